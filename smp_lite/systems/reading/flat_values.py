"""Nested values that a plan only carries, as pairs of key and frozen value, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .python_tree import Unknown

__all__ = ["flatten_values", "nest_values"]


def flatten_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields ``(dotted key, value)`` of each leaf; lists become tuples, what is no plain value its text. A
    dictionary without keys has none."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from flatten_values(f"{key}.{name}", below)
    else:
        yield key, _frozen(value)


def nest_values(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns nested dictionaries of dotted keys; tuples become lists."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        *above, last = key.split(".")
        here = tree
        for name in above:
            here = here.setdefault(name, {})
        here[last] = list(value) if isinstance(value, tuple) else value
    return tree


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain and not isinstance(value, Unknown) else str(value)
