"""In which order things happen on the device: each stream does what it is given in turn.

What the stream that computes is given happens at once, but for its copies into pinned memory. What any other
stream is given happens late: when the computing stream, or the host, has to wait for it. By then the memory
may have been changed or freed by those who did not wait.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

__all__ = ["COMPUTING", "Late", "Queue", "current", "finish", "host_waited", "queue_of", "touch"]

COMPUTING = 0
"""Number of the stream that computes."""

host_waits = 0
"""How often the host has waited for the device, as far as it did so by a stream, an event, or for all."""


class Late(Protocol):
    """Something that a stream has been given."""

    is_done: bool

    def do(self) -> None: ...


class Queue:
    """One stream.

    Attributes:
        seen: how many operations of the computing stream it has waited for.
    """

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number
        self.seen = 0
        self._entries: list[Late] = []

    def push(self, late: Late) -> None:
        self._entries.append(late)

    @property
    def last(self) -> Late | None:
        return self._entries[-1] if self._entries else None

    def finish(self, upto: Late | None = None) -> None:
        """Does what it has been given, or the first of it."""
        while self._entries and (upto is None or not upto.is_done):
            entry = self._entries.pop(0)
            entry.is_done = True
            entry.do()


_queues: dict[tuple[int, int], Queue] = {}
_ticks: dict[int, int] = {}
_thread = threading.local()


def host_waited() -> None:
    global host_waits
    host_waits += 1


def queue_of(index: int, number: int = COMPUTING) -> Queue:
    return _queues.setdefault((index, number), Queue(index, number))


def current(index: int) -> Queue:
    """The thread's current stream."""
    return queue_of(index, getattr(_thread, "number", COMPUTING))


def set_current(number: int) -> int:
    """Of this thread; returns the one before."""
    before = getattr(_thread, "number", COMPUTING)
    _thread.number = number
    return before


def finish(index: int) -> None:
    """All that the device has been given."""
    for queue in list(_queues.values()):
        if queue.index == index:
            queue.finish()


def tick(index: int) -> int:
    """How many operations the computing stream has been given."""
    return _ticks.get(index, 0)


def touch(storage: Any, index: int) -> None:
    """The current stream uses the memory; of what others do, they keep book themselves."""
    if current(index).number == COMPUTING:
        _ticks[index] = storage.pretended_tick = tick(index) + 1


def touched(storage: torch.UntypedStorage) -> int:
    """After which operation of the computing stream the memory has been let alone."""
    found: int = getattr(storage, "pretended_tick", 0)
    return found
