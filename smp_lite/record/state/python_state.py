"""What Python code can change without torch hearing of it: attributes, containers, closures, generators.

A fake run of a module must leave no trace, and what it *would* leave has to be known: a module that appends
to a list, counts its calls, or stores a tensor on itself cannot be run later and elsewhere as one closed
call, since the lines after the call may look at it. :class:`PythonState` copies everything of that kind that
can be reached from some roots, says afterwards what has changed first, and puts it back.

Reached are attributes of modules and of other Python objects, the contents of lists, dicts, sets and deques,
closures, default arguments, and the states of random generators. Not looked into: what belongs to torch,
logging, threading and files.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .parts import (
    ATOMS,
    Attributes,
    Cached,
    Items,
    Numbers,
    Part,
    Random,
    classes_of,
    is_iterator,
    is_opaque,
    is_users_class,
    part_of,
)

__all__ = [
    "NeedsOpening",
    "PythonState",
    "cache_among",
    "iterator_among",
    "iterators_split",
    "stuck_among",
]

MAX_DEPTH = 6
MAX_OBJECTS = 200_000


class NeedsOpening(Exception):
    """A closed call of the module would not be the same; the reason is the text: ``sets x.count``."""


class PythonState:
    """A copy of what can be reached from the roots that are added.

    Args:
        passes_over: tells objects that are not looked into.
        only_compares: nothing will be put back, so what is long or large is looked at too.

    Attributes:
        opaque: names of what nobody can copy, since to look into it is to take from it.
    """

    def __init__(
        self, passes_over: Callable[[Any], bool] | None = None, *, only_compares: bool = False
    ) -> None:
        self.opaque: list[str] = []
        self._only_compares = only_compares
        self._passes_over = passes_over
        self._seen: dict[int, Any] = {}  # keeps them alive, so that ids stay theirs
        self._parts: list[Part] = []

    def add(self, root: Any, where: str) -> None:
        """Copies what can be reached from ``root``, which errors call ``where``."""
        pending = [(root, where, 0)]
        while pending and len(self._seen) < MAX_OBJECTS:
            value, name, depth = pending.pop()
            if id(value) in self._seen or (isinstance(value, ATOMS) and not is_users_class(value)):
                continue
            self._seen[id(value)] = value
            if self._passes_over is not None and self._passes_over(value):
                continue
            part = self._long(value, name) if self._only_compares else None
            if part is None:
                part = part_of(value, name)
            if part is None:
                if is_opaque(value):
                    self.opaque.append(f"{name}, a {type(value).__name__}")
                continue
            self._parts.append(part)
            pending += [(kind, kind.__name__, depth) for kind in classes_of(value)]
            if depth < MAX_DEPTH:
                pending += [
                    (inner, label, 0 if isinstance(inner, nn.Module) else depth + 1)
                    for label, inner in part.inner()
                ]

    @staticmethod
    def _long(value: Any, name: str) -> Part | None:
        if isinstance(value, list | dict | set | deque):
            return Items(value, name)
        is_array = "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)
        return Numbers(value, name) if is_array or isinstance(value, torch.Tensor) else None

    def generators(self) -> list[Any]:
        """The random generators among it."""
        return [part.value for part in self._parts if isinstance(part, Random)]

    def changed(self) -> str | None:
        """The first thing that is no longer as it was, in words; None if all is."""
        for part in self._parts:
            text = part.changed()
            if text is not None:
                return text
        return None

    def restore(self) -> None:
        """Puts everything back."""
        for part in reversed(self._parts):
            part.restore()


@contextlib.contextmanager
def iterators_split(state: PythonState) -> Iterator[None]:
    """A run takes from copies of iterators. What it takes out stays to be taken by the next one."""
    for part in state._parts:
        holder = part.kept if isinstance(part, Attributes | Items) else None
        entries = holder.items() if isinstance(holder, dict) else enumerate(holder or ())
        for key, item in list(entries):
            if is_iterator(item) and not hasattr(item, "fileno"):
                mine, theirs = itertools.tee(item)
                holder[key] = mine  # type: ignore[index]
                target = part.value.__dict__ if isinstance(part, Attributes) else part.value
                with contextlib.suppress(TypeError):
                    target[key] = theirs
    yield


def iterator_among(state: PythonState, *more: Any) -> str | None:
    """The name of an iterator among the things copied: nobody can put back what is taken out of one."""
    for item in more:
        if is_iterator(item):
            return f"that it is given, a {type(item).__name__}"
    for part in state._parts:
        for name, item in part.inner():
            if is_iterator(item):
                return name
    return None


def stuck_among(state: PythonState) -> str | None:
    """The name of something whose items a run takes for good: :func:`iterators_split` does not reach it."""
    for part in state._parts:
        splits = isinstance(part, Attributes | Items)
        for name, item in part.inner():
            if is_opaque(item) and not (splits and is_iterator(item)):
                return name
    return None


def cache_among(state: PythonState) -> str | None:
    """The name of an ``lru_cache`` among the things copied: what was in it cannot be put back."""
    return next((part.name for part in state._parts if isinstance(part, Cached)), None)
