"""Work that all ranks do, or none: where it fails on one, every rank gets an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...errors import SMPError
from ...session import Session

__all__ = ["together"]

T = TypeVar("T")


def together(session: Session, what: str, work: Callable[[], T]) -> list[T]:
    """Calls ``work`` on every rank, and waits for all. Collective over all ranks.

    Args:
        session: with the ranks.
        what: names the call in errors; the same on all ranks.
        work: must not be collective itself, and return something picklable.

    Returns:
        What it returned on each rank, by rank.

    Raises:
        Exception: what ``work`` raised on this rank.
        SMPError: it failed on another rank; names the rank and what it said.
        SMPTimeout: a rank did not come.
    """
    if session.world is None:
        return [work()]
    error: Exception | None = None
    outcome: tuple[T | None, str | None]
    try:
        outcome = (work(), None)
    except Exception as caught:
        error = caught
        outcome = (None, f"{type(caught).__name__}: {caught}")
    found = session.world.exchange(outcome, "WORLD", what)
    if error is not None:
        raise error
    failures = {rank: text for rank, (_, text) in enumerate(found) if text is not None}
    if failures:
        first = min(failures)
        raise SMPError(
            f"{what} failed on rank(s) {', '.join(map(str, failures))}; rank {first} says: {failures[first]}"
        )
    return [value for value, _ in found]  # type: ignore[misc]
