"""What a stage as a machine (:mod:`.stage_machines`) has to choose from."""

from __future__ import annotations

__all__ = ["NEVER", "Pool", "Stage"]

NEVER = float("inf")


class Pool:
    """Ready tasks of one stage that are admitted together."""

    __slots__ = ("begun", "cap", "future", "now")

    def __init__(self, begun: bool = True, cap: float = NEVER) -> None:
        self.now: list[int] = []
        self.future: list[tuple[float, int]] = []
        self.begun = begun  # whether the microbatches are in flight
        self.cap = cap  # as many may be in flight on the stage; without one they are always admitted


class Stage:
    """One machine: what it may do next, and what is in flight there."""

    __slots__ = (
        *("backwards", "bounded", "forwards_left", "free_at", "held", "here", "open", "pools", "start"),
        "task",
    )

    def __init__(self) -> None:
        self.free_at = 0.0
        self.start = NEVER
        """Of the next task; it is the stage's entry in the queue."""
        self.task = -1
        self.here = 0  # microbatches in flight on this stage
        self.held = 0  # those, and the ones of which there are still W to come
        self.forwards_left = 0
        self.open = Pool()
        self.backwards = Pool()  # of `simple`: among the pools after all forwards
        self.bounded: tuple[dict[int, Pool], dict[int, Pool]] = ({}, {})
        """By bound, of microbatches that are not in flight, and of those that are."""
        self.pools = [self.open]
