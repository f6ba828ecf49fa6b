"""When the actions of a step ran.

On the host an action has run when its method returns. A device has hardly begun by then, so its spans are
events in the stream that computes: they cost the host two calls for each action, and nothing waits for them
until somebody asks.
"""

from __future__ import annotations

import time
from typing import Any

from ...devices import home, is_host, synchronize, timed_event
from ...plan.step.actions import Action

__all__ = ["Span", "Spans"]


class Span:
    """When an action ran: ``time.perf_counter`` seconds; waiting comes before ``start_s``."""

    __slots__ = ("action", "end_s", "start_s")

    def __init__(self, action: Action, start_s: float, end_s: float) -> None:
        self.action, self.start_s, self.end_s = action, start_s, end_s


class Spans:
    """Those of one stage in one step.

    Attributes:
        are_on_device: what an action waits for must be queued before :meth:`begin`.
    """

    def __init__(self) -> None:
        self.are_on_device = not is_host(home())
        self._ended: list[tuple[Action, float, float]] = []
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self) -> Any:
        """An action begins now; what :meth:`end` wants to know."""
        return timed_event() if self.are_on_device else time.perf_counter()

    def end(self, action: Action, begun: Any) -> None:
        """It ends here."""
        if self.are_on_device:
            self._marks.append((action, begun, timed_event()))
        else:
            self._ended.append((action, begun, time.perf_counter()))

    def clear(self) -> None:
        """A new step."""
        self._ended.clear()
        self._marks.clear()

    def all(self) -> list[Span]:
        """In the order in which they ended; waits for the device."""
        if self._marks:
            now = timed_event()
            synchronize()
            now_s = time.perf_counter()
            for action, begun, ended in self._marks:
                start_s, end_s = [now_s - event.elapsed_time(now) * 1e-3 for event in (begun, ended)]
                self._ended.append((action, start_s, end_s))
            self._marks.clear()
        return [Span(*each) for each in self._ended]
