"""Work that finds more of its kind, done one after another: chains of it may be deeper than Python goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Worklist"]


class Worklist:
    """Args:
    work: is given each item; it may add others, which wait until it has ended.
    """

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work
        self._pending: deque[tuple[Any, ...]] = deque()
        self._is_at_work = False

    def add(self, *item: Any) -> None:
        """Does this one, and what it finds, before it returns; within the work: later."""
        self._pending.append(item)
        if self._is_at_work:
            return
        self._is_at_work = True
        try:
            while self._pending:
                self._work(*self._pending.popleft())
        finally:
            self._is_at_work = False
            self._pending.clear()
