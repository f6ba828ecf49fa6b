"""What a person wrote: the tree of a configuration with the origin of each key, and command-line changes.

Every dialect reads its keys through :class:`Written`. So each value comes with who said it, a wrong type is
told alike everywhere, and no key of a checked part can pass unread.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config.errors import ConfigError, complaint
from ..plan.parallel_plan import Said
from .python_tree import Unknown
from .texts import read_literal

__all__ = ["COMMAND_LINE", "MOST", "Written", "near_keys", "split_override", "unknown_key"]

COMMAND_LINE = "command line"
MOST = 100_000
"""Ranks of a job, stages, layers, microbatches of a step: more is a slip of the pen, and would take all time
and memory to list."""

Path = tuple[str, ...]


@dataclass
class Written:
    """A configuration as it was read, before anybody asked what it means.

    Attributes:
        dialect: the system.
        tree: nested dictionaries of keys.
        file: path, or None for a dictionary.
        origins: of single keys, where they were set, if better known than ``file``.
        warnings: found while reading.
        others: names in the file that are not about parallelism.
    """

    dialect: str
    tree: dict[str, Any]
    file: str | None = None
    origins: dict[Path, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def has(self, *path: str) -> bool:
        """Whether somebody wrote this key."""
        return self._find(path)[0]

    def get(self, *path: str, default: Any = None) -> Any:
        """Returns the value of a key, or ``default``.

        Raises:
            ConfigError: the value comes from a file that is not there.
        """
        found, value = self._find(path)
        if isinstance(value, Unknown):
            raise ConfigError(
                f"{'.'.join(path)} is {value!r}, which is not known here: {value.why()}; give the value "
                f"itself, for example on the command line: {'.'.join(path)}=24"
            )
        return value if found else default

    def set(self, path: Path, value: Any, origin: str) -> None:
        """Replaces or adds one key, and everything below it."""
        here = self.tree
        for key in path[:-1]:
            if not isinstance(here.get(key), dict):
                # pipeline=2 and pipeline.size=2 say one thing, and the later one wins.
                here[key] = {}
            here = here[key]
        here[path[-1]] = value
        self.origins = {key: old for key, old in self.origins.items() if key[: len(path)] != path}
        self.origins[path] = origin

    def said(self, *path: str, how: str = "", is_inferred: bool = False) -> Said:
        """Who said a key; where nobody did, it is a default, and ``how`` says whence."""
        key = ".".join(path)
        if not self.has(*path):
            return Said(self.dialect, None, key, is_default=True, how=how, is_inferred=is_inferred)
        return Said(self.dialect, self.origin(*path), key, how=how)

    def origin(self, *path: str) -> str | None:
        """Where a key was set: that of the nearest key above it that is known."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.file

    def is_own(self, *path: str) -> bool:
        """Whether a key was set by the file itself or a change, not by a file that it imports."""
        origin, own = self.origin(*path), str(self.file)
        return origin in (None, COMMAND_LINE, own) or str(origin).rpartition(":")[0] == own

    def integer(self, *path: str, default: int, least: int = 1) -> int:
        """Returns an integer of ``least`` or more."""
        value = self.get(*path, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            text = f"{'.'.join(path)} must be a whole number of {least} or more."
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_less = is_number and value < least
            way_out = f"write {least} or more" if is_less else "write a whole number, without quotes"
            self.fail(text, *path, way_out=way_out)
        return int(value)

    def optional_integer(self, *path: str, least: int = 1) -> int | None:
        """As :meth:`integer`; None where it is None or not there."""
        return None if self.get(*path) is None else self.integer(*path, default=least, least=least)

    def switch(self, *path: str, default: bool) -> bool:
        """Returns True or False."""
        value = self.get(*path, default=default)
        if not isinstance(value, bool):
            self.fail(f"{'.'.join(path)} must be true or false.", *path, way_out="write it without quotes")
        return bool(value)

    def choice(self, *path: str, options: Sequence[str], default: str) -> str:
        """Returns one of the options."""
        value = self.get(*path, default=default)
        if value not in options:
            close = difflib.get_close_matches(str(value).lower(), options, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "write one of these"
            self.fail(f"{'.'.join(path)} must be one of {list(options)}.", *path, way_out=hint)
        return str(value)

    def mapping(self, *path: str) -> Mapping[str, Any]:
        """Returns a dictionary of str keys; an empty one where the key is not there or None."""
        value = self.get(*path)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fail(f"{'.'.join(path)} must hold keys and values.", *path, way_out="write a dictionary")
        return value

    def check_keys(self, known: Iterable[str], *path: str) -> None:
        """Raises ConfigError for the first key below ``path`` that is not known."""
        tree = self.mapping(*path) if path else self.tree
        for key in tree:
            if key not in set(known):
                raise ConfigError(
                    unknown_key(".".join((*path, str(key))), key, known, self.origin(*path, key))
                )

    def fail(self, text: str, *path: str, way_out: str) -> None:
        """Raises ConfigError about one key, its value and the way out."""
        where = self.origin(*path)
        place = f" [{where}]" if where is not None and self.has(*path) else ""
        raise ConfigError(complaint(text, ".".join(path), self._find(path)[1], way_out) + place)

    def limit(self, count: int, what: str, *path: str) -> None:
        """Raises ConfigError, with a key that has made it so large, for more than ``MOST`` of something."""
        if count > MOST:
            text = f"It makes {count} {what}, and there are {MOST} at most."
            self.fail(text, *path, way_out="write smaller sizes")

    def _find(self, path: Path) -> tuple[bool, Any]:
        here: Any = self.tree
        for key in path:
            if isinstance(here, Unknown):
                return True, here
            if not isinstance(here, Mapping) or key not in here:
                return False, None
            here = here[key]
        return True, here


def unknown_key(full: str, key: object, known: Iterable[str], where: str | None = None) -> str:
    """The text for a key that a dialect does not have."""
    known = sorted(known)
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(known)}"
    return f"unknown key {full!r}: {hint}" + (f" [{where}]" if where else "")


_NEAR = 0.85
"""How alike a variable's name is to a key that it was meant for; ``clip_grad`` and ``NUM_BATCHES``, which
files have for themselves, are less."""


def near_keys(name: str, known: Iterable[str]) -> list[str]:
    """The keys that a variable of a Python file may have been meant for, the nearest first.

    A file may have any variables of its own, so these are nearer than a key that is unknown for sure: the
    same but for case and underscores, two letters changed about, or few letters of many. A key of one word
    with another word (``train_data`` of ``train``) is not near it.
    """
    words, text = _words(name), "".join(_words(name))
    found: list[tuple[float, str]] = []
    for key in known:
        theirs = _words(key)
        if len(theirs) == 1 < len(words) and theirs[0] in words:
            continue
        other = "".join(theirs)
        likeness = difflib.SequenceMatcher(None, text, other).ratio()
        if likeness >= _NEAR or sorted(text) == sorted(other):
            found.append((-likeness, key))
    return [key for _, key in sorted(found)]


def _words(name: str) -> list[str]:
    return [word for word in name.lower().split("_") if word]


def split_override(text: str) -> tuple[str, Any]:
    """Returns key and value of ``key=value``.

    Raises:
        ConfigError: it is something else, such as Hydra's ``~key``.
    """
    if text.startswith("~"):
        raise ConfigError(
            f"{text!r}: a key cannot be deleted from the command line; give it its default value"
        )
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or key.startswith("-"):
        raise ConfigError(f"{text!r} is not key=value, such as partitions=4")
    if key.startswith("+"):
        raise ConfigError(f"{text!r}: write it without '+'; new keys need no mark")
    return key, read_literal(value, key)
