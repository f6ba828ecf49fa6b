"""Planning without Python's collector of circles: a step is millions of tuples, and none is in a circle.

The collector would look through all of them again and again while they are made, for half of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_gc"]


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Within: circles are not collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
