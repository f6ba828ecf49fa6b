"""Who hears of attributes of modules that are set while what was recorded runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

__all__ = ["attribute_set", "hearing_attributes"]

_listener: Callable[[nn.Module, str], None] | None = None


def attribute_set(module: nn.Module, name: str) -> None:
    """An attribute is about to be set, outside of recording."""
    if _listener is not None:
        _listener(module, name)


@contextlib.contextmanager
def hearing_attributes(listener: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within: the listener hears of each attribute of a module that is set."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
