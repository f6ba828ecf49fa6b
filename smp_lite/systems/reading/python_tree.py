"""Values of Python configuration files: a dictionary with attributes, and a value that nobody knows.

LiBai's files write ``train.dist.tensor_parallel_size = 8``. A :class:`Tree` takes that, and remembers the
file and line of each key. :class:`Unknown` stands for what a file imports and this machine does not have: it
can be passed on and changed, but not used as a value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...config.errors import ConfigError

__all__ = ["Tree", "Unknown", "plain"]


class Tree(dict[str, Any]):
    """A dictionary whose keys are attributes too; ``origins_here`` says where each key was set."""

    origins_here: dict[str, str]

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), origin: str = "") -> None:
        super().__init__()
        object.__setattr__(self, "origins_here", {})
        for key, value in dict(values).items():
            self._put(key, value, origin)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no key {name!r}; there are {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._put(name, value, _caller())

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value, _caller())

    def __delattr__(self, name: str) -> None:
        del self[name]

    def update(self, *others: Any, **values: Any) -> None:  # type: ignore[override]
        """As of a dictionary."""
        origin = _caller()
        for key, value in dict(*others, **values).items():
            self._put(key, value, origin)

    def _put(self, name: str, value: Any, origin: str) -> None:
        if isinstance(value, Mapping) and not isinstance(value, Tree):
            value = Tree(value, origin)
        super().__setitem__(name, value)
        self.origins_here[name] = origin


class Unknown:
    """A value that is not there. Parts, calls and arithmetic give others; only a use as a value fails."""

    def __init__(self, name: str, reason: str) -> None:
        object.__setattr__(self, "_unknown", (name, reason))

    def why(self) -> str:
        """The reason, for an error."""
        return str(object.__getattribute__(self, "_unknown")[1])

    def __repr__(self) -> str:
        return str(object.__getattribute__(self, "_unknown")[0])

    def _part(self, text: str) -> Unknown:
        return Unknown(f"{self!r}{text}", self.why())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._part(f".{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getitem__(self, key: Any) -> Unknown:
        return self._part(f"[{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nobody will read it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part("(...)")

    def _with(self, other: Any) -> Unknown:
        return Unknown(f"an expression of {self!r}", self.why())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _with
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = _with

    def __iter__(self) -> Iterator[Any]:
        raise self._no_value()

    def __bool__(self) -> bool:
        raise self._no_value()

    def __index__(self) -> int:
        raise self._no_value()

    def _no_value(self) -> ConfigError:
        return ConfigError(f"{self!r} is used as a value and is not known here: {self.why()}")


def plain(tree: Tree, path: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Returns the tree as ordinary dictionaries, and the origin of each path in it."""
    values: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for key, value in tree.items():
        here = (*path, key)
        if tree.origins_here.get(key):
            origins[here] = tree.origins_here[key]
        if isinstance(value, Tree):
            values[key], below = plain(value, here)
            origins |= below
        else:
            values[key] = value
    return values, origins


def _caller() -> str:
    """File and line of the first frame outside this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
