"""What leaves a device by way of the host's memory: started when its copy has come there, in order.

The host runs ahead of the device: when a tensor is given to a wire or a collective, the device may not even
have begun to compute it. So the copy is queued on the device, an event marks its end, and what follows (a
message, a collective) is started by whoever looks next. Order is kept, since peers count on it. Every wait of
the process looks (:func:`~.waiting.while_waiting`): a rank that waits for a gradient sends meanwhile what the
gradient depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...devices import Event
from ..waiting import while_waiting

__all__ = ["Outbox", "Posted"]


class _Started(Protocol):
    def done(self) -> bool: ...


class Posted:
    """Something that is started when an event has happened; polled like what it starts."""

    def __init__(self, outbox: Outbox, event: Event | None, start: Callable[[], _Started]) -> None:
        self._outbox, self.event = outbox, event
        self._start: Callable[[], _Started] | None = start
        self.started: _Started | None = None

    def start(self) -> None:
        """Its event has happened, and it is its turn."""
        assert self._start is not None
        self.started, self._start = self._start(), None

    def done(self) -> bool:
        """Polls."""
        if self.started is None:
            self._outbox.advance()
        return self.started is not None and self.started.done()


class Outbox:
    """The queue of one wire, or of one group's collectives."""

    def __init__(self) -> None:
        self._waiting: deque[Posted] = deque()
        while_waiting(self)

    def post(self, event: Event | None, start: Callable[[], _Started]) -> Posted:
        """Has ``start`` called when the event has happened, and after all that was posted before.

        Args:
            event: None: it has.
            start: begins what is to be polled.
        """
        posted = Posted(self, event, start)
        self._waiting.append(posted)
        self.advance()
        return posted

    def advance(self) -> None:
        """Starts what can be started."""
        waiting = self._waiting
        while waiting and (waiting[0].event is None or waiting[0].event.query()):
            waiting.popleft().start()
