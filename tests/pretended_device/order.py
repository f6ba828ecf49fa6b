"""In which order things happen on the device: each stream does what it is given in turn.

What the stream that computes is given happens at once, but for its copies into pinned memory. What any other
stream is given happens late: when the computing stream, or the host, has to wait for it. By then the memory
may have been changed or freed by those who did not wait. What other devices have a part in may never end; the
device stands still then (:func:`wait_in_vain`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = [
    "COMPUTING",
    "Late",
    "Queue",
    "before_reading",
    "catch_up",
    "caught_up",
    "check_order",
    "current",
    "finish",
    "follow",
    "host_waited",
    "made_beside",
    "note_only",
    "queue_of",
    "touch",
    "wait_in_vain",
]

COMPUTING = 0
"""Number of the stream that computes."""

host_waits = 0
"""How often the host has waited for the device: by a stream, an event, for all, or to read a number."""


class Late(Protocol):
    """Something that a stream has been given.

    Attributes:
        is_done: nobody asks for it any more.
    """

    is_done: bool

    def do(self) -> None:
        """Does it, or waits for it."""

    def has_ended(self) -> bool:
        """Whether a device would be behind it, if it had come there. Changes nothing; any thread may ask."""


class Queue:
    """One stream.

    Attributes:
        seen: how many operations of the computing stream it has waited for.
    """

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number
        self.seen = 0
        self._entries: list[Late] = []
        self._doing: Late | None = None

    def push(self, late: Late) -> None:
        self._entries.append(late)

    @property
    def last(self) -> Late | None:
        return self._entries[-1] if self._entries else None

    def finish(self, upto: Late | None = None) -> None:
        """Does what it has been given, or the first of it."""
        while self._entries and (upto is None or not upto.is_done):
            before, entry = self._doing, self._entries[0]
            self._doing = entry  # first, so that whoever looks finds it in one of the places
            self._entries.pop(0)
            try:
                entry.do()
            finally:
                entry.is_done = True
                self._doing = before

    def has_come_to(self, late: Late | None) -> bool:
        """Whether a device would be behind it by now. Changes nothing; any thread may ask."""
        if _stands_still():
            return False
        if late is None or late.is_done:
            return True
        waiting = list(self._entries)
        for entry in [self._doing, *waiting]:
            if entry is not None and not entry.has_ended():
                return False
            if entry is late:
                break
        return True


_queues: dict[tuple[int, int], Queue] = {}
_ticks: dict[int, int] = {}
_made: dict[
    tuple[int, int], int
] = {}  # by stream beside the computing one, operations that it has been given
_caught_up: dict[tuple[int, int], int] = {}  # how many of them the computing stream has waited for
_thread = threading.local()
_is_noted = False


_in_vain: list[Callable[[], bool]] = []


def host_waited() -> None:
    """The host waits for the device."""
    before_reading()
    _caught_up.update(_made)


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


def forget() -> None:
    """What a session has left queued is nobody's when it has ended."""
    _queues.clear()
    _in_vain.clear()
    _made.clear()
    _caught_up.clear()


def follow(late: Late, index: int) -> None:
    """The current stream goes on after it. The one that computes cannot, here, without the host."""
    queue = current(index)
    if queue.number != COMPUTING:
        queue.push(late)
    elif not late.is_done:
        late.do()
        late.is_done = True


def catch_up() -> None:
    """Before an operation, which happens at once: what its stream has been given is done."""
    own = getattr(_thread, "number", COMPUTING)
    if own != COMPUTING:
        for (_, number), queue in list(_queues.items()):
            if number == own:
                queue.finish()


def wait_in_vain(is_over: Callable[[], bool]) -> None:
    """The device stands still until that is so, and the host when it waits for what the device has."""
    _in_vain.append(is_over)


def _stands_still() -> bool:
    return not all(is_over() for is_over in list(_in_vain))


def before_reading() -> None:
    """The host wants to read something."""
    global host_waits
    host_waits += 1
    while _stands_still():
        time.sleep(0.001)
    _in_vain.clear()


def tick(index: int) -> int:
    """How many operations the computing stream has been given."""
    return _ticks.get(index, 0)


def note_only(is_on: bool) -> None:
    """From now on what streams are given is captured: nothing happens to memory. Or no more."""
    global _is_noted
    _is_noted = is_on


def touch(storage: Any, index: int) -> None:
    """The current stream has changed the memory, or made it."""
    if _is_noted:
        return
    number = current(index).number
    if number == COMPUTING:
        _ticks[index] = storage.pretended_tick = tick(index) + 1
    else:
        key = (index, number)
        _made[key] = _made.get(key, 0) + 1
        storage.pretended_beside = (key, _made[key])


def check_order(storage: Any, index: int) -> None:
    """Before the current stream uses the memory.

    Raises:
        RuntimeError: it has not waited for the stream that has changed the memory.
    """
    queue = current(index)
    if queue.number != COMPUTING:
        if touched(storage) > queue.seen:
            raise RuntimeError(
                "a stream beside the computing one has not waited for what that one does with the memory"
            )
        return
    key, number = getattr(storage, "pretended_beside", ((index, COMPUTING), 0))
    if number > _caught_up.get(key, 0):
        raise RuntimeError("the computing stream has not waited for what another one has made")


def made_beside(queue: Queue) -> int:
    """How many operations a stream beside the computing one has been given."""
    return _made.get((queue.index, queue.number), 0)


def caught_up(queue: Queue, number: int) -> None:
    """The computing stream, or the host, has waited for so many operations of another."""
    key = (queue.index, queue.number)
    _caught_up[key] = max(number, _caught_up.get(key, 0))


def touched(storage: torch.UntypedStorage) -> int:
    """After which operation of the computing stream the memory has been let alone."""
    found: int = getattr(storage, "pretended_tick", 0)
    return found
