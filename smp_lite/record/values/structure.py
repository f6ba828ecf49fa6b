"""Taking nested Python values apart and putting them together again.

Arguments and results of modules are arbitrary nests: tuples, named tuples, lists, dicts and their
subclasses (``ModelOutput`` of transformers), dataclasses, types registered with torch's pytree.
:func:`flatten` gives the leaves and a *spec*; :func:`rebuild` is its inverse with other leaves. Specs of
the built-in containers are plain nested tuples, so that they hash and compare and can be part of a cache
key; torch's own pytree is used only for types that were registered with it, since walking the common
containers by hand is several times faster and this runs for every recorded command.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .placed import PlacedTensor

Spec = Any
"""None for a leaf; else a tuple (kind, ...)."""

LEAF: Spec = None
_COMMON_LEAVES = frozenset(
    (torch.Tensor, nn.Parameter, PlacedTensor, int, float, str, bool, bytes, complex, type(None))
)
_FLAT_SPECS: dict[int, Spec] = {}
_EXACT_SPECS: set[Spec] = set()  # without a nest of a user's own class
_MOST_EXACT_SPECS = 256


def flat_spec(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spec:
    """The spec of (args, kwargs) without containers and keywords, always the same object; else None.

    Most calls are such, and need not be walked.
    """
    if kwargs or not _COMMON_LEAVES.issuperset(map(type, args)):
        return None
    found = _FLAT_SPECS.get(len(args))
    if found is None:
        found = _FLAT_SPECS[len(args)] = ("tuple", ("tuple", *[LEAF for _ in args]), ("dict", ()))
    return found


def are_plain(leaves: Iterable[Any]) -> bool:
    """Whether all are tensors and plain values."""
    return _COMMON_LEAVES.issuperset(map(type, leaves))


def is_flat(spec: Spec, num_leaves: int) -> bool:
    """Whether :func:`flat_spec` has made it, of so many arguments."""
    return spec is _FLAT_SPECS.get(num_leaves)


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Appends the leaves of ``value`` to ``leaves`` and returns its spec."""
    kind = type(value)
    if kind in _COMMON_LEAVES:
        leaves.append(value)
        return LEAF
    if kind is tuple:
        return ("tuple", *[flatten(item, leaves) for item in value])
    if kind is list:
        return ("list", *[flatten(item, leaves) for item in value])
    if kind is dict:
        return ("dict", tuple(value), *[flatten(item, leaves) for item in value.values()])
    if kind is slice:
        return ("slice", *[flatten(item, leaves) for item in (value.start, value.stop, value.step)])
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return ("pytree", kind, _Context(context), *[flatten(item, leaves) for item in children])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("namedtuple", kind, *[flatten(item, leaves) for item in value])
    if isinstance(value, tuple):
        return ("tuple subclass", kind, *[flatten(item, leaves) for item in value])
    if isinstance(value, dict):
        parts = [flatten(item, leaves) for item in value.values()]
        return ("mapping", _Template(value), tuple(value), *parts)
    if isinstance(value, list):
        return ("list subclass", _Template(value), *[flatten(item, leaves) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        parts = [flatten(getattr(value, name), leaves) for name in names]
        return ("dataclass", _Template(value), names, *parts)
    leaves.append(value)
    return LEAF


def rebuild(spec: Spec, leaves: Iterator[Any]) -> Any:
    """Builds the nest that ``spec`` describes, taking leaves in order."""
    if spec is LEAF:
        return next(leaves)
    kind = spec[0]
    if kind == "tuple":
        return tuple([rebuild(part, leaves) for part in spec[1:]])
    if kind == "list":
        return [rebuild(part, leaves) for part in spec[1:]]
    if kind == "dict":
        return {key: rebuild(part, leaves) for key, part in zip(spec[1], spec[2:], strict=True)}
    if kind == "slice":
        return slice(*[rebuild(part, leaves) for part in spec[1:]])
    if kind == "pytree":
        children = [rebuild(part, leaves) for part in spec[3:]]
        return pytree.SUPPORTED_NODES[spec[1]].unflatten_fn(children, spec[2].value)
    if kind == "namedtuple":
        return spec[1](*[rebuild(part, leaves) for part in spec[2:]])
    if kind == "tuple subclass":
        return spec[1]([rebuild(part, leaves) for part in spec[2:]])
    if kind == "mapping":
        return _rebuild_mapping(spec, leaves)
    if kind == "list subclass":
        result = copy.copy(spec[1].value)
        result[:] = [rebuild(part, leaves) for part in spec[2:]]
        return result
    result = copy.copy(spec[1].value)
    for name, part in zip(spec[2], spec[3:], strict=True):
        object.__setattr__(result, name, rebuild(part, leaves))
    return result


def _rebuild_mapping(spec: Spec, leaves: Iterator[Any]) -> Any:
    result = copy.copy(spec[1].value)
    for key, part in zip(spec[2], spec[3:], strict=True):
        result[key] = rebuild(part, leaves)
    return result


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest with ``function`` applied to every leaf."""
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    return rebuild(spec, iter([function(leaf) for leaf in leaves]))


def exact_spec(spec: Spec) -> Spec:
    """The same, but that nests of a user's own class are equal only if their other attributes are, too.

    Of those only plain values can be: with anything else a spec is not even equal to itself.
    """
    if type(spec) is not tuple or spec in _EXACT_SPECS:
        return spec
    exact = _exact(spec)
    if exact is spec:
        if len(_EXACT_SPECS) >= _MOST_EXACT_SPECS:
            _EXACT_SPECS.clear()
        _EXACT_SPECS.add(spec)
    return exact


def _exact(spec: Spec) -> Spec:
    """Itself, if no nest in it is of a user's own class."""
    if type(spec) is not tuple:
        return spec
    parts = [_exact(part) for part in spec]
    if len(spec) > 1 and type(spec[1]) is _Template:
        leaves = spec[2] if spec[0] in ("mapping", "dataclass") else ()
        own = getattr(spec[1].value, "__dict__", {}).items()
        parts += [
            (key, type(item), repr(item) if isinstance(item, bool | int | float | str | None) else object())
            for key, item in own
            if key not in leaves
        ]
    elif all(map(operator.is_, parts, spec)):
        return spec
    return tuple(parts)


class _Context:
    """A pytree context inside a spec; equal if the contexts are, hashed by type only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class _Template:
    """The object whose class and extra attributes a rebuilt one takes over."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Template) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))
