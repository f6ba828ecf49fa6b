"""Places: where plain Python state lies that a recorded call reads, and can be given back to it.

A call is recorded with the values at its places, and runs with them: if they are others by then, they are put
in for the time of the run (:func:`in_force`).
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .containers import MISSING, contents_of, refill

__all__ = [
    "PLAIN",
    "Array",
    "Attribute",
    "Cell",
    "Contents",
    "Item",
    "ModuleAttribute",
    "Place",
    "PlacesRead",
    "Row",
    "Variable",
    "in_force",
    "is_plain",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


class Place(Protocol):
    """Somewhere that a plain value can be read and put."""

    name: str
    identity: Hashable

    def get(self) -> Hashable: ...

    def put(self, value: Any) -> None: ...

    def value(self) -> Any:
        """What :meth:`put` takes to bring back the present state."""


class Item:
    """An entry of a namespace: a global variable, an attribute of an object."""

    def __init__(self, holder: dict[str, Any], key: str, name: str) -> None:
        self.holder, self.key, self.name = holder, key, name
        self.identity = (id(holder), key)

    def get(self) -> Hashable:
        return _key_of(self.holder.get(self.key, MISSING))

    def value(self) -> Any:
        return self.holder.get(self.key, MISSING)

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class Attribute:
    """An attribute of a class, or of an object without a ``__dict__`` of its own (``threading.local``)."""

    def __init__(self, holder: Any, key: str, name: str) -> None:
        self.holder, self.key, self.name = holder, key, name
        self.identity = (id(holder), key)

    def get(self) -> Hashable:
        return _key_of(self.value())

    def value(self) -> Any:
        if isinstance(self.holder, type):
            return self.holder.__dict__.get(self.key, MISSING)
        return getattr(self.holder, self.key, MISSING)

    def put(self, value: Any) -> None:
        if value is not MISSING:
            setattr(self.holder, self.key, value)
        elif self.value() is not MISSING:
            delattr(self.holder, self.key)


class Variable:
    """A context variable."""

    def __init__(self, variable: contextvars.ContextVar[Any], name: str) -> None:
        self.variable, self.name, self.identity = variable, name, id(variable)
        self._tokens: list[contextvars.Token[Any]] = []

    def get(self) -> Hashable:
        return _key_of(self.value())

    def value(self) -> Any:
        try:
            return self.variable.get()
        except LookupError:
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self._tokens.append(self.variable.set(value))
        elif self._tokens:
            self.variable.reset(self._tokens[0])
            self._tokens.clear()


class Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: Any, name: str) -> None:
        self.cell, self.name, self.identity = cell, name, id(cell)

    def value(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return MISSING

    def get(self) -> Hashable:
        return _key_of(self.value())

    def put(self, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


class Contents:
    """What a list, dict or set of plain values holds."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name, self.identity = holder, name, id(holder)

    def get(self) -> Hashable:
        held = contents_of(self.holder)
        items = held.items() if isinstance(held, dict) else held
        return tuple(map(_key_of, items))

    def value(self) -> Any:
        return contents_of(self.holder)

    def put(self, value: Any) -> None:
        refill(self.holder, value)


class Array:
    """The numbers in a small numpy array."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name, self.identity = holder, name, id(holder)

    def get(self) -> Hashable:
        return bytes(self.holder.tobytes())

    def value(self) -> Any:
        return self.holder.copy()

    def put(self, value: Any) -> None:
        self.holder[...] = value


class Row:
    """The numbers in a ``bytearray`` or an ``array.array``."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name, self.identity = holder, name, id(holder)

    def get(self) -> Hashable:
        return bytes(self.holder)

    def value(self) -> Any:
        return self.holder[:]

    def put(self, value: Any) -> None:
        self.holder[:] = value


class ModuleAttribute:
    """An attribute of a module, set without anybody hearing of it."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module, self.key = module, key
        self.identity = (id(module), key)
        self.name = f"{type(module).__name__}.{key}"

    def value(self) -> Any:
        return self.module.__dict__.get(self.key, MISSING)

    def get(self) -> Hashable:
        return _key_of(self.value())

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.module.__dict__.pop(self.key, None)
        else:
            self.module.__dict__[self.key] = value


def _is_entry(place: Place) -> bool:
    """Whether it can be read from a table by its key."""
    return type(place) is Item or (type(place) is Attribute and isinstance(place.holder, type))


class PlacesRead:
    """The places that one module's calls read, and what was there at the last look.

    Attributes:
        objects: what they read beside, which has no places, with names.
        functions: functions and classes that they call by a global name: (namespace, name).
    """

    def __init__(
        self,
        places: Sequence[Place],
        objects: Sequence[tuple[Any, str]] = (),
        functions: Sequence[tuple[dict[str, Any], str]] = (),
    ) -> None:
        self.objects, self.functions = objects, functions
        entries = [p for p in places if _is_entry(p)]
        attributes = [p for p in places if type(p) is Attribute and not _is_entry(p)]
        self._others = [p for p in places if not _is_entry(p) and type(p) is not Attribute]
        self.places = [*entries, *attributes, *self._others]
        self._items = [(p.holder if type(p) is Item else p.holder.__dict__, p.key) for p in entries]
        self._attributes = [(p.holder, p.key) for p in attributes]
        self._found: list[Any] = [self]  # in the items and attributes, at the last look
        self.seen: Seen = Seen([], [])

    def look(self) -> Seen:
        """What is there now; the same object as long as it is the same."""
        found = [holder.get(key, MISSING) for holder, key in self._items]
        if self._attributes:
            found += [getattr(holder, key, MISSING) for holder, key in self._attributes]
        if not self._others and all(map(operator.is_, found, self._found)):
            return self.seen
        self._found = found
        keys: list[Hashable] = [*map(_key_of, found), *[place.get() for place in self._others]]
        if keys != self.seen.keys:
            self.seen = Seen(keys, [*found, *[place.value() for place in self._others]])
        return self.seen

    def others_than_now(self, seen: Seen) -> list[tuple[Place, Any]]:
        """The places that hold something else now, with what was seen there."""
        now = self.look()
        return [
            (place, value)
            for place, old, new, value in zip(self.places, seen.keys, now.keys, seen.values, strict=True)
            if old != new
        ]


class Seen:
    """What was at the places once: ``keys`` to compare, ``values`` to put back, a number for equal keys."""

    __slots__ = ("keys", "number", "values")

    def __init__(self, keys: list[Hashable], values: list[Any]) -> None:
        self.keys, self.values = keys, values
        self.number = _numbers.setdefault(tuple(keys), len(_numbers))


_numbers: dict[Hashable, int] = {}


@contextlib.contextmanager
def in_force(state: Iterable[tuple[Place, Any]]) -> Iterator[None]:
    """Within: the places hold these values; afterwards what they held before."""
    before = []
    try:
        for place, value in state:
            before.append((place, place.value()))
            place.put(value)
        yield
    finally:
        for place, value in reversed(before):
            place.put(value)


def _key_of(value: Any) -> Hashable:
    """Stands for a value: two have the same only if code cannot tell them apart. 1 is not 1.0 nor True."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # 0.0 is not -0.0
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, tuple):
        return kind, *map(_key_of, value)
    return (kind, value) if isinstance(value, PLAIN) else id(value)


def is_plain(item: Any) -> bool:
    """Whether an item of a container is a plain value, or a tuple of such."""
    if isinstance(item, tuple):
        return all(map(is_plain, item))
    return isinstance(item, PLAIN)
