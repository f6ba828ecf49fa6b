"""Work without Python's collector of circles.

Planning has millions of tuples, and none is in a circle: the collector would look through all of them again
and again while they are made, for half of the time. Others say why where they use it.
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
