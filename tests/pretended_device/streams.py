"""The device's streams and events, with the methods of CUDA's."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from . import graphs
from .order import (
    COMPUTING,
    Late,
    Queue,
    caught_up,
    current,
    finish,
    host_waited,
    made_beside,
    queue_of,
    set_current,
    tick,
)

_POLLS = 2
"""How often an event says that it has not happened yet."""

_numbers = itertools.count(COMPUTING + 1)


class Stream:
    """Does in order what it is given; a new one beside those that there are."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device_index = _index(device)
        self.stream_id = kwargs.get("stream_id") or next(_numbers)

    @classmethod
    def of(cls, queue: Queue) -> Stream:
        found = cls.__new__(cls)
        found.device_index, found.stream_id = queue.index, queue.number
        return found

    @property
    def _queue(self) -> Queue:
        return queue_of(self.device_index, self.stream_id)

    def synchronize(self) -> None:
        self._queue.finish()
        host_waited()

    def wait_event(self, event: Event) -> None:
        queue = self._queue
        if queue.number == COMPUTING:
            event.happen()
            event.is_behind()
        else:
            queue.push(_Wait(event))
            queue.seen = max(queue.seen, event.seen)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        queue = self._queue
        return queue.last is None and queue.has_come_to(None)

    def __enter__(self) -> Stream:
        self._before = set_current(self.stream_id)
        return self

    def __exit__(self, *error: Any) -> None:
        set_current(self._before)


class Event:
    """A place in a stream; it is polled some times until it has happened."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._queue: Queue | None = None
        self._after: Late | None = None
        self._polls = 0
        self.seen = self._made = 0
        self._is_timed, self._time_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time_s = time.perf_counter()
        queue = self._queue = current(_index(None)) if stream is None else stream._queue
        self._after = queue.last
        self._made = made_beside(queue)
        self.seen = tick(queue.index) if queue.number == COMPUTING else queue.seen
        self._polls = _POLLS if self._after is not None else 0

    def query(self) -> bool:
        graphs.refuse_host("an event is queried", spoils=True)
        if self._queue is not None and not self._queue.has_come_to(self._after):
            return False
        if threading.current_thread().name == "smp-device-watch":  # looks, and changes nothing
            return True
        if self._polls:
            self._polls -= 1
            return False
        self.happen()
        self.is_behind()
        return True

    def elapsed_time(self, other: Event) -> float:
        if not (self._is_timed and other._is_timed):
            raise RuntimeError("both events must be made with enable_timing")
        return (other._time_s - self._time_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.of(current(_index(None)))).wait_event(self)

    def synchronize(self) -> None:
        self.happen()
        host_waited()

    def is_behind(self) -> None:
        """What has been made before it may be used."""
        if self._queue is not None:
            caught_up(self._queue, self._made)

    def happen(self) -> None:
        """What is before it in its stream is done."""
        self._polls = 0
        if self._queue is not None and self._after is not None:
            self._queue.finish(self._after)
        self._after = None


class _Wait:
    """One stream's place after which another one goes on."""

    is_done = False

    def __init__(self, event: Event) -> None:
        self._queue, self._after = event._queue, event._after

    def do(self) -> None:
        if self._queue is not None and self._after is not None:
            self._queue.finish(self._after)

    def has_ended(self) -> bool:
        return self._queue is None or self._queue.has_come_to(self._after)


def synchronize(index: int) -> None:
    """The host waits for the device."""
    finish(index)
    host_waited()


def _index(device: Any) -> int:
    from .backend import MODULE

    return MODULE._index(device)
