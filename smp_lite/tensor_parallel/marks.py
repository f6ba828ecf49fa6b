"""Which modules the user wants to be distributed: marks that a context or a call leaves on them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Mark", "mark", "mark_of", "marking"]


@dataclass(frozen=True)
class Mark:
    """Attributes: whether the module is to be distributed, and arguments of its distributed counterpart
    that go before what the module's own say."""

    enabled: bool
    options: dict[str, Any] = field(default_factory=dict)


_marks: weakref.WeakKeyDictionary[nn.Module, Mark] = weakref.WeakKeyDictionary()
_stack: list[Mark] = []


def mark_of(module: nn.Module) -> Mark | None:
    """Its own mark; None: as the module around it."""
    return _marks.get(module)


def mark(module: nn.Module, wanted: Mark) -> None:
    """Marks a module and all modules in it, whatever they were marked with before."""
    for part in module.modules():
        _marks[part] = wanted


@contextlib.contextmanager
def marking(wanted: Mark) -> Iterator[None]:
    """Within: modules that are made are marked; the innermost context wins.

    Copies count as made, and come to life without ``__init__``, in ``__setstate__``.
    """
    _stack.append(wanted)
    try:
        if len(_stack) > 1:
            yield
            return
        births = {name: getattr(nn.Module, name) for name in ("__init__", "__setstate__")}
        for name, original in births.items():
            setattr(nn.Module, name, _noting(original))
        try:
            yield
        finally:
            for name, original in births.items():
                setattr(nn.Module, name, original)
    finally:
        _stack.pop()


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    def born(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        if module not in _marks:
            _marks[module] = _stack[-1]

    return born
