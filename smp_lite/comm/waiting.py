"""Every wait in the library: polls, with a limit, and says for whom it waited.

Polling instead of blocking keeps the process able to notice that the limit has passed. The pauses grow:
first it only yields the processor (a message takes tens of microseconds), then it sleeps, so that ranks
that share a core do not steal it from the one they wait for. Each sleep is a small part of the time waited
so far, so that what comes is noticed late by that part at most: a pipeline waits once for each action, for
about as long as an action takes.

A rank whose script has ended will send nothing any more. Each says so when it leaves (see
:class:`.groups.world.World`), and a wait for it ends with an error at once instead of at the limit.
Over gloo its connections close as well, which may be noticed first; its word comes soon then, and the error
can name it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..errors import SMPError, SMPTimeout

WATCHDOG_VARIABLE = "SMP_LITE_WATCHDOG_S"
DEFAULT_WATCHDOG_S = 300.0

_YIELD_FOR_S = 0.002
_SLEEP_S = 0.00005
_LONGEST_SLEEP_S = 0.001
_SLEEP_PART = 0.02

# A message sent just before its sender left may still be on its way. And if the sender failed, the launcher
# has the time to end this process too, before it reports a loss that is only a consequence.
_GRACE_S = 1.0


class BrokenConnection(RuntimeError):
    """A transfer failed; only :func:`wait_until` knows what it was for."""


@contextlib.contextmanager
def broken_connections_named() -> Iterator[None]:
    """Within: what torch.distributed raises becomes :class:`BrokenConnection`."""
    try:
        yield
    except RuntimeError as error:
        raise BrokenConnection(str(error).splitlines()[0]) from None


class Advances(Protocol):
    """Something under way that needs a push now and then."""

    def advance(self) -> None:
        """Cheap."""


_under_way: weakref.WeakSet[Any] = weakref.WeakSet()
_watchdog_s: float | None = None
_departed: Callable[[], Mapping[int, bytes]] = dict


def watchdog_s() -> float:
    """How long anything may wait, in seconds: :func:`set_watchdog`, else the variable, else 300.

    Raises:
        ValueError: the variable is no positive number.
    """
    if _watchdog_s is not None:
        return _watchdog_s
    text = os.environ.get(WATCHDOG_VARIABLE)
    if text is None:
        return DEFAULT_WATCHDOG_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _is_limit(seconds):
        raise ValueError(f"{WATCHDOG_VARIABLE}={text!r}: give a positive number of seconds")
    return seconds


def set_watchdog(seconds: float | None) -> None:
    """Sets the limit of all waits in this process; None goes back to the variable or the default."""
    global _watchdog_s
    if seconds is not None and not _is_limit(seconds):
        raise ValueError(f"set_watchdog({seconds}): give a positive number of seconds")
    _watchdog_s = seconds


def _is_limit(seconds: float) -> bool:
    """NaN is smaller than nothing and larger than nothing: no wait would ever end."""
    return 0 < seconds < math.inf


def watch_departures(departed: Callable[[], Mapping[int, bytes]]) -> None:
    """Sets whom to ask which world ranks have left (and their last words)."""
    global _departed
    _departed = departed


def while_waiting(what: Advances) -> None:
    """From now on ``what`` is advanced in every wait of this process, for as long as somebody holds it.

    What waits for one thing keeps up others that a peer may be waiting for.
    """
    _under_way.add(what)


def wait_until(
    test: Callable[[], bool], what: Callable[[], str], ranks: Callable[[], Iterable[int]] = tuple
) -> None:
    """Polls ``test`` until it is true.

    Args:
        test: must be cheap, and drive the transfer that it waits for.
        what: says for whom and for what, if it fails.
        ranks: world ranks that are waited for.

    Raises:
        SMPTimeout: the watchdog's limit has passed.
        SMPError: a rank that is waited for has ended its script, or a connection broke.
    """
    try:
        return _poll(test, what, ranks)
    except BrokenConnection as error:
        broken = error
    time.sleep(_GRACE_S)
    _raise_if_gone(ranks, what)
    raise SMPError(f"a connection between ranks broke: {what()} ({broken})")


def _poll(test: Callable[[], bool], what: Callable[[], str], ranks: Callable[[], Iterable[int]]) -> None:
    if test():
        return
    under_way = list(_under_way) if _under_way else ()
    start = time.monotonic()
    limit = 0.0
    look_at, gone_since = start + 0.1, None
    while not test():
        for each in under_way:
            each.advance()
        now = time.monotonic()
        if now - start < _YIELD_FOR_S:
            os.sched_yield()
            continue
        limit = limit or watchdog_s()  # reading the environment would make short waits longer
        if now - start > limit:
            raise SMPTimeout(
                f"waited {limit:g} s: {what()}. "
                f"(The limit is set by smp.set_watchdog(seconds) or {WATCHDOG_VARIABLE}.)"
            )
        if now > look_at:
            look_at = now + 0.1
            gone_since = (gone_since or now) if _gone(ranks) else None
            if gone_since is not None and now - gone_since > _GRACE_S:
                _raise_if_gone(ranks, what)
        time.sleep(min(max(_SLEEP_S, (now - start) * _SLEEP_PART), _LONGEST_SLEEP_S))


def _gone(ranks: Callable[[], Iterable[int]]) -> list[int]:
    return sorted(_departed().keys() & set(ranks()))


def _raise_if_gone(ranks: Callable[[], Iterable[int]], what: Callable[[], str]) -> None:
    if gone := _gone(ranks):
        raise SMPError(f"rank(s) {', '.join(map(str, gone))} ended the script early: {what()}")
