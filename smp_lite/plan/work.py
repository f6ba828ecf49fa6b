"""What is to be scheduled, and how: the works of microbatches and the policy."""

from __future__ import annotations

from dataclasses import dataclass

from .segments import Segment, SegmentGraph

__all__ = ["BACKWARD_COST_RATIO", "PIPELINES", "Policy", "Work"]

PIPELINES = ("simple", "interleaved", "zero_bubble", "interleaved_virtual", "zero_bubble_v", "_only_forward")

SPLITTING = frozenset({"zero_bubble", "zero_bubble_v"})
"""Pipelines in which gradients of parameters are actions of their own."""

# A backward computes two products where the forward computes one.
BACKWARD_COST_RATIO = 2.0


@dataclass(frozen=True)
class Policy:
    """How to order the work: the schedule part of a Config."""

    pipeline: str = "interleaved"
    optimize: str = "memory"
    active_microbatches: int = 4

    @property
    def splits_backward(self) -> bool:
        """Whether every backward is followed, some time later, by a ``W``."""
        return self.pipeline in SPLITTING

    def __post_init__(self) -> None:
        if self.pipeline not in PIPELINES:
            raise ValueError(f"pipeline must be a value in: {list(PIPELINES)}, got {self.pipeline!r}")
        if self.optimize not in ("memory", "speed"):
            raise ValueError(f"optimize must be a value in: ['speed', 'memory'], got {self.optimize!r}")
        if self.active_microbatches < 1:
            raise ValueError(f"active_microbatches must be positive, got {self.active_microbatches}")


@dataclass(frozen=True)
class Work:
    """What is to be scheduled for one microbatch.

    ``forward_done`` and ``backward_done`` hold the segments that have run already (execution was forced
    while recording). ``complete`` is False while the microbatch is still being recorded: then only its
    forwards are scheduled, its backward comes later.
    """

    microbatch_index: int
    graph: SegmentGraph
    forward_done: frozenset[int] = frozenset()
    backward_done: frozenset[int] = frozenset()
    complete: bool = True

    def pending_forwards(self) -> list[Segment]:
        return [s for s in self.graph.segments if s.index not in self.forward_done]

    def pending_backwards(self) -> list[Segment]:
        if not self.complete:
            return []
        return [s for s in self.graph.segments if s.has_backward and s.index not in self.backward_done]

    @property
    def kind(self) -> tuple[int, frozenset[int], frozenset[int], bool]:
        """Works of one kind differ in nothing but their microbatch; valid while the works are there."""
        return id(self.graph), self.forward_done, self.backward_done, self.complete
