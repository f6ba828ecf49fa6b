"""What is to be scheduled, and how: the works of microbatches and the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .actions import ActionKind
from .segments import Segment, SegmentGraph

__all__ = ["BACKWARD_COST_RATIO", "PIPELINES", "ActionCosts", "Costs", "Policy", "Work", "compute_cost"]

PIPELINES = ("simple", "interleaved", "zero_bubble", "interleaved_virtual", "zero_bubble_v", "_only_forward")

SPLITTING = frozenset({"zero_bubble", "zero_bubble_v"})
"""Pipelines in which gradients of parameters are actions of their own."""

# A backward computes two products where the forward computes one.
BACKWARD_COST_RATIO = 2.0

_LEAST_COST = 1e-12


class ActionCosts(NamedTuple):
    """What a segment's actions cost, as measured; ``backward`` is without what a ``W`` does."""

    forward: float
    backward: float
    weight: float = 0.0


Costs = Mapping[tuple[int, int], ActionCosts]
"""By (stage, visit)."""


def compute_cost(kind: ActionKind, segment: Segment, *, split: bool, costs: Costs | None = None) -> float:
    """What a forward, backward or ``W`` of the segment costs.

    Args:
        split: whether the backward leaves its ``weight_cost`` to a ``W``.
        costs: of all segments; None: the recorded ones, a backward twice the forward.
    """
    if costs is not None:
        measured = costs[segment.stage_index, segment.visit]
        if kind is ActionKind.FORWARD:
            return measured.forward
        if kind is ActionKind.WEIGHT:
            return measured.weight
        return measured.backward + (0.0 if split and segment.weight_cost else measured.weight)
    if kind is ActionKind.FORWARD:
        return segment.forward_cost
    if kind is ActionKind.WEIGHT:
        return segment.weight_cost
    whole = BACKWARD_COST_RATIO * segment.forward_cost
    return max(whole - segment.weight_cost, _LEAST_COST) if split and segment.weight_cost else whole


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

    def pending_weights(self) -> list[Segment]:
        """Pending backwards that, under a policy that splits them, are each followed by a ``W``."""
        return [s for s in self.pending_backwards() if s.weight_cost > 0]

    @property
    def kind(self) -> tuple[int, frozenset[int], frozenset[int], bool]:
        """Works of one kind differ in nothing but their microbatch; valid while the works are there."""
        return id(self.graph), self.forward_done, self.backward_done, self.complete
