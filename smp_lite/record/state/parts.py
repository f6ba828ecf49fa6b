"""Copies of single objects' contents: what has changed in one, and how it is put back.

One class for each way in which Python objects hold things: a ``__dict__``, slots, items, a closure, an array,
the state of a random generator. :func:`part_of` chooses.
"""

from __future__ import annotations

import enum
import functools
import queue
import random
import sys
import threading
import types
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..values.memory import digest_of, is_given_back, version_of
from .containers import MISSING, base_of, contents_of, refill, same_plain
from .flat_weights import SECOND_LISTS

__all__ = [
    "ATOMS",
    "Attributes",
    "Cached",
    "Items",
    "Numbers",
    "Part",
    "Random",
    "classes_of",
    "is_iterator",
    "is_opaque",
    "is_users_class",
    "may_change",
    "part_of",
]

MAX_LENGTH = 4096
MAX_ARRAY_BYTES = 1 << 20

ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MethodWrapperType),
    enum.Enum,
    type,
)
_FOREIGN = (
    "torch",
    "logging",
    "threading",
    "_thread",
    "io",
    "_io",
    "weakref",
    "re",
    "numpy",
    "mpi4py",
    "_abc",
)
_OWN = tuple(f"{__name__.partition('.')[0]}.{part}" for part in ("comm.", "session", "steps.", "runtime."))
"""What parallel layers talk through, which says nothing while a module runs on fake tensors, and what runs
steps, which is found from an optimizer."""
# Swapped for fake ones during a fake run, which looks after them itself.
_TABLES = SECOND_LISTS | {"_parameters", "_buffers"}
_KIND_OF_HOOKS = "_is_full_backward_hook"
"""Says nothing without hooks, and stays when they have gone."""
_RANDOM = (random.Random, torch.Generator)


class Part:
    """One object with a copy of its contents."""

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name

    def inner(self) -> Iterator[tuple[str, Any]]:
        yield from ()

    def changed(self) -> str | None:
        return None

    def restore(self) -> None:
        pass


class Attributes(Part):
    """The ``__dict__`` of an object."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.is_module = isinstance(value, nn.Module)
        self.kept = dict(value.__dict__)

    def inner(self) -> Iterator[tuple[str, Any]]:
        for key, item in self.kept.items():
            if self.is_module and key in _TABLES:
                continue
            if self.is_module and key == "_modules":
                for own, child in item.items():
                    yield f"{self.name}.{own}" if self.name else own, child
            yield f"{self.name}.{key}" if self.name else key, item

    def changed(self) -> str | None:
        now = self.value.__dict__
        for key in {**self.kept, **now}:
            if self.is_module and (key in _TABLES or key == _KIND_OF_HOOKS):
                continue
            old, new = self.kept.get(key, MISSING), now.get(key, MISSING)
            if old is not new and not _equal(old, new):
                return f"sets {self.name}.{key}" if self.name else f"sets {key}"
        return None

    def restore(self) -> None:
        now = self.value.__dict__
        if now.keys() != self.kept.keys() or any(now[key] is not item for key, item in self.kept.items()):
            now.clear()
            now.update(self.kept)


class _ClassAttributes(Part):
    """What a class of the user's holds beside its methods."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.kept = {key: item for key, item in vars(value).items() if not _is_definition(key, item)}

    def inner(self) -> Iterator[tuple[str, Any]]:
        for key, item in self.kept.items():
            yield f"{self.name}.{key}", item

    def changed(self) -> str | None:
        now = {key: item for key, item in vars(self.value).items() if not _is_definition(key, item)}
        for key in {**self.kept, **now}:
            old, new = self.kept.get(key, MISSING), now.get(key, MISSING)
            if old is not new and not _equal(old, new):
                return f"sets {self.name}.{key}"
        return None

    def restore(self) -> None:
        for key in list(vars(self.value)):
            item = vars(self.value)[key]
            if not _is_definition(key, item) and key not in self.kept:
                delattr(self.value, key)
        for key, item in self.kept.items():
            if vars(self.value).get(key, MISSING) is not item:
                setattr(self.value, key, item)


class _Slots(Part):
    """The slots of an object without a ``__dict__``."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        names = [slot for kind in type(value).__mro__ for slot in _slots_of(kind)]
        self.kept = {slot: getattr(value, slot, MISSING) for slot in names}

    def inner(self) -> Iterator[tuple[str, Any]]:
        for key, item in self.kept.items():
            yield f"{self.name}.{key}", item

    def changed(self) -> str | None:
        for key, old in self.kept.items():
            new = getattr(self.value, key, MISSING)
            if old is not new and not _equal(old, new):
                return f"sets {self.name}.{key}"
        return None

    def restore(self) -> None:
        for key, item in self.kept.items():
            if getattr(self.value, key, MISSING) is not item and item is not MISSING:
                object.__setattr__(self.value, key, item)


class Items(Part):
    """The items of a list, deque, dict or set."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.kept = contents_of(value)

    def inner(self) -> Iterator[tuple[str, Any]]:
        if isinstance(self.kept, dict):
            for key, item in self.kept.items():
                yield f"{self.name}[{key!r}]" if isinstance(key, str | int) else self.name, item
        else:
            for i, item in enumerate(self.kept):
                yield f"{self.name}[{i}]", item

    def changed(self) -> str | None:
        now = contents_of(self.value)
        if len(now) == len(self.kept):
            pairs = (
                [(old, now.get(key, MISSING)) for key, old in self.kept.items()]
                if isinstance(now, dict)
                else list(zip(self.kept, now, strict=True))
            )
            if all(old is new or _equal(old, new) for old, new in pairs):
                return None
        return f"changes {self.name}, a {type(self.value).__name__}"

    def restore(self) -> None:
        if self.changed() is not None:
            refill(self.value, self.kept)


class _Function(Part):
    """The closure, the defaults and the attributes of a function."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.cells = [(cell, _contents(cell)) for cell in value.__closure__ or ()]

    def inner(self) -> Iterator[tuple[str, Any]]:
        for free, (_, item) in zip(self.value.__code__.co_freevars, self.cells, strict=False):
            yield free, item
        yield f"a default of {self.name}", list(self.value.__defaults__ or ())
        for key, item in (self.value.__kwdefaults__ or {}).items():
            yield f"the default of {key}", item
        if self.value.__dict__:
            yield f"an attribute of {self.name}", self.value.__dict__

    def changed(self) -> str | None:
        for free, (cell, old) in zip(self.value.__code__.co_freevars, self.cells, strict=False):
            new = _contents(cell)
            if old is not new and not _equal(old, new):
                return f"sets {free}, a variable around {self.name}"
        return None

    def restore(self) -> None:
        for cell, old in self.cells:
            if _contents(cell) is not old:
                if old is MISSING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = old


class _Inner(Part):
    """Something with parts and no state of its own."""

    def __init__(self, value: Any, name: str, parts: list[Any]) -> None:
        super().__init__(value, name)
        self.parts = parts

    def inner(self) -> Iterator[tuple[str, Any]]:
        for item in self.parts:
            yield self.name, item


class Cached(Part):
    """A ``functools.lru_cache``: what a fake run has put in must not stay."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.kept = value.cache_info()

    def changed(self) -> str | None:
        now = self.value.cache_info()
        is_same = (now.currsize, now.misses) == (self.kept.currsize, self.kept.misses)
        if is_same and now.hits >= self.kept.hits:  # they only fall when it is cleared
            return None
        return f"fills {self.name}, a cache"

    def restore(self) -> None:
        if self.changed() is not None:
            self.value.cache_clear()


class _Array(Part):
    """A numpy array, which Python code changes in place."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.kept = value.copy()

    def changed(self) -> str | None:
        same = self.value.shape == self.kept.shape and self.value.tobytes() == self.kept.tobytes()
        return None if same else f"changes {self.name}, an array"

    def restore(self) -> None:
        if self.changed() is not None:
            self.value[...] = self.kept


class _Tensor(Part):
    """A tensor that is neither a parameter nor a buffer, in an attribute or a list."""

    def __init__(self, value: torch.Tensor, name: str) -> None:
        super().__init__(value, name)
        self.version = version_of(value)
        num_bytes = value.numel() * value.element_size()
        small = num_bytes <= MAX_ARRAY_BYTES and type(value) is torch.Tensor
        small = small and not is_given_back(value)
        with _disable_current_modes():  # a fake run may be on
            self.kept = value.detach().clone() if small and not value.is_meta else None

    def changed(self) -> str | None:
        is_same = version_of(self.value) == self.version
        if is_same and self.kept is not None and not self.value.untyped_storage().resizable():
            is_same = digest_of(self.value) == digest_of(self.kept)  # numpy may have changed it
        return None if is_same else f"changes {self.name}, a tensor, in place"

    def restore(self) -> None:
        if self.kept is not None and self.changed() is not None:
            with torch.no_grad():
                self.value.copy_(self.kept)


class Numbers(Part):
    """A tensor or a numpy array of any size, to compare; it is not put back."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.seen = self._look()

    def _look(self) -> tuple[int, int]:
        if isinstance(self.value, torch.Tensor):
            return version_of(self.value), digest_of(self.value)
        return 0, zlib.crc32(self.value.tobytes())

    def changed(self) -> str | None:
        if self._look() == self.seen:
            return None
        what = "a tensor, in place" if isinstance(self.value, torch.Tensor) else "an array"
        return f"changes {self.name}, {what}"


class Random(Part):
    """A random generator of the user's own."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.get, self.set = _random_access(value)
        self.kept = self.get()

    def changed(self) -> str | None:
        now = self.get()
        same = torch.equal(now, self.kept) if isinstance(now, torch.Tensor) else _same_state(now, self.kept)
        return None if same else f"draws from {self.name}"

    def restore(self) -> None:
        if self.changed() is not None:
            self.set(self.kept)


def is_opaque(value: Any) -> bool:
    if isinstance(value, queue.SimpleQueue):
        return True
    return is_iterator(value) and not is_users_class(type(value)) and not hasattr(value, "fileno")


def is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not isinstance(value, torch.Tensor | nn.Module)


_DEFINITIONS = (
    types.FunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    staticmethod,
    classmethod,
    property,
)


def _is_definition(key: str, item: Any) -> bool:
    return (
        (key.startswith("__") and key.endswith("__")) or isinstance(item, _DEFINITIONS) or key == "_abc_impl"
    )


def is_users_class(value: Any) -> bool:
    if not isinstance(value, type) or issubclass(value, enum.Enum):
        return False
    first = value.__module__.partition(".")[0]
    return _is_users(first) and first not in sys.stdlib_module_names


def classes_of(value: Any) -> list[type]:
    """The user's classes of an object, whose attributes its methods may change."""
    if isinstance(value, type):
        return []
    return [kind for kind in type(value).__mro__ if is_users_class(kind)]


def part_of(value: Any, name: str) -> Part | None:
    """The copy of one object; None if it holds nothing that changes."""
    kind = type(value)
    if isinstance(value, type):
        return _ClassAttributes(value, name)
    if isinstance(value, nn.Module):
        return Attributes(value, name)
    if isinstance(value, list | dict | set | deque):
        return Items(value, name) if base_of(value).__len__(value) <= MAX_LENGTH else None
    if isinstance(value, tuple | frozenset):
        inner = contents_of(value)
        return _Inner(value, name, inner) if 0 < len(inner) <= MAX_LENGTH else None
    if kind is types.FunctionType:
        # By where its code is: functools.wraps() copies the name of another module.
        return _Function(value, name) if _is_users(value.__globals__.get("__name__")) else None
    if kind is types.MethodType:
        return _Inner(value, name, [value.__func__, value.__self__])
    if kind is functools.partial:
        return _Inner(value, name, [value.func, value.args, value.keywords])
    if isinstance(value, _RANDOM) or _random_access(value) is not None:
        return Random(value, name)
    if isinstance(value, functools._lru_cache_wrapper):
        return Cached(value, name)
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        return _Array(value, name) if value.nbytes <= MAX_ARRAY_BYTES else None
    if isinstance(value, torch.Tensor):
        return _Tensor(value, name) if kind in (torch.Tensor, nn.Parameter) else None
    if isinstance(value, threading.local):
        return Attributes(value, name)
    if not _is_users(kind.__module__):
        return None
    if isinstance(getattr(value, "__dict__", None), dict):
        return Attributes(value, name)
    return _Slots(value, name) if any(True for k in kind.__mro__ for _ in _slots_of(k)) else None


def may_change(value: Any) -> bool:
    """Whether a call that is given the value could find something else in it later."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, torch.Tensor) or (isinstance(value, ATOMS) and not is_users_class(value)):
        return False
    kind = type(value)
    if kind is types.FunctionType:
        return bool(value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__)
    if kind is types.MethodType:
        return may_change(value.__self__)
    if kind is functools.partial:
        return any(map(may_change, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, tuple | frozenset):
        return any(map(may_change, value))
    return part_of(value, "") is not None


def _is_users(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] not in _FOREIGN and not name.startswith(_OWN)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


def _random_access(value: Any) -> Any:
    """(getter, setter) of a generator's state; None if it is none."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    kind = type(value)
    if kind.__module__.startswith("numpy.random"):
        if kind.__name__ == "RandomState":
            return value.get_state, value.set_state
        if kind.__name__ == "Generator":
            bits = value.bit_generator
            return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


def _same_state(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values are the same; anything else counts by identity."""
    return isinstance(a, _PLAIN) and same_plain(a, b)


_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
