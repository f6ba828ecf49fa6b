"""Collectives that a device never comes to the end of: the job ends by a named error.

The host does not wait for a device, so no wait of ours notices that one hangs, because another rank's does
not come. It shows when the script looks at a number: then the process stands in a call of the device's driver
for good, and no Python of its runs. So a thread looks, now and then, at the last collective that it knows of
each group: if it could begin (what was queued before it has ended) and has not ended within the watchdog's
limit, the thread does with the error what the main thread would with one that nobody catches, which ends the
job. To abort the group and go on would be to go on with nonsense in the device's memory.

If the driver holds that thread too, so that no Python runs at all, the process ends by itself after three
limits, with the stacks of all threads. (``faulthandler`` has one such alarm: a script's own is replaced.)

One collective of each group is looked at, since they end in order; a limit passes once or twice before the
error comes. While the library captures a graph the thread does not look: a capture may forbid it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ...device_graphs import unless_capturing
from ...devices import make_current
from ...errors import SMPTimeout
from ..waiting import WATCHDOG_VARIABLE, watchdog_s
from .groups import abort

__all__ = ["Watched", "first_overdue"]

_LONGEST_PAUSE_S = 1.0


class Watched:
    """The collectives of one group, as the thread sees them.

    Args:
        ranks: world ranks of the group.

    Attributes:
        name: for errors.
        group: that is aborted.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.name = f"a collective between the devices of ranks {', '.join(map(str, ranks))}"
        self.group: Any = None
        self._latest: tuple[Any, Any] | None = None
        self._seen: tuple[Any, Any] | None = None
        self._since: float | None = None

    def note(self, computed: Any, ended: Any) -> None:
        """One is queued.

        Args:
            computed: the event before which it cannot begin.
            ended: the event after it. Without events all is done at once.
        """
        if ended is not None:
            if self._latest is None:
                _watch(self)
            self._latest = computed, ended

    def forget(self) -> None:
        """Nothing more is to be expected of it."""
        self._latest = self._seen = None

    def overdue(self, now: float, limit: float) -> bool:
        """Looks at what is under way."""
        if self._seen is None or self._seen[1].query():
            self._seen, self._since = self._latest, None
        elif self._since is None and self._seen[0].query():
            self._since = now
        return self._since is not None and now - self._since > limit


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _watch(watched: Watched) -> None:
    global _thread
    with _lock:
        _watched.add(watched)
        if _thread is None:
            _thread = threading.Thread(target=_look_now_and_then, name="smp-device-watch", daemon=True)
            _thread.start()


def _look_now_and_then() -> None:
    make_current()  # or the thread would be on the first device, and take memory there for every rank
    while True:
        limit = watchdog_s()
        _end_if_stuck(3 * limit)
        time.sleep(min(_LONGEST_PAUSE_S, limit / 10))
        watched = first_overdue(limit)
        if watched is not None:
            _end(watched, limit)
            return


def _end_if_stuck(seconds: float) -> None:
    """Ends the process if this is not called again by then: a thread that the driver holds in a call, with
    Python's lock in its hand, lets no Python run."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # standard error is no file
        faulthandler.dump_traceback_later(seconds, exit=True)


def first_overdue(limit: float) -> Watched | None:
    """Looks at all groups, unless that must wait."""
    with _lock:
        found = list(_watched)
    for watched in found:
        with unless_capturing() as may_look:
            if may_look and watched.overdue(time.monotonic(), limit):
                return watched
    return None


def _end(watched: Watched, limit: float) -> None:
    error = SMPTimeout(
        f"waited {limit:g} s: {watched.name} has begun and does not end: not all of them have come to it, or "
        f"one of them has died. (The limit is set by smp.set_watchdog(seconds) or {WATCHDOG_VARIABLE}.)"
    )
    sys.excepthook(SMPTimeout, error, None)  # does not return, but where a script has put in another
    abort(watched.group)
