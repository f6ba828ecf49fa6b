"""What the actions of a schedule cost, as recorded or measured: the same in each microbatch, but for what a
backward leaves to a ``W``, which the schedule says.
"""

from __future__ import annotations

from functools import cached_property

from .actions import Action, ActionKind
from .lowering import Schedule
from .segments import Segment
from .work import Costs, compute_cost

__all__ = ["RecordedCost"]


class RecordedCost:
    """The default cost: the recorded one, a backward twice the forward, or what its ``W`` leaves of that.

    Args:
        schedule: it says which backwards leave something to a ``W``.
        costs: as measured, instead of the recorded ones.
        unit: what the result is counted in.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None = None, unit: float = 1.0) -> None:
        self.costs, self.unit = costs, unit
        self.schedule = schedule

    @cached_property
    def split(self) -> set[tuple[int, int, int]]:
        """(Stage, microbatch, visit) of the backwards that leave something to a ``W``."""
        weight = ActionKind.WEIGHT
        return {
            (stage, m, visit)
            for actions in self.schedule
            for stage, kind, m, visit, _, _ in actions
            if kind is weight
        }

    def __call__(self, action: Action, segment: Segment) -> float:
        stage, kind, m, visit, _, _ = action
        return self.of(kind, segment, split=(stage, m, visit) in self.split)

    def of(self, kind: ActionKind, segment: Segment, *, split: bool) -> float:
        """The same in each microbatch."""
        return compute_cost(kind, segment, split=split, costs=self.costs) / self.unit
