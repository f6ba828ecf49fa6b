"""Which shape of stages and which schedule takes least time within a bound of memory: a pure function.

An alternative is a microbatch's graph (partitions differ in it) and a policy. Each is ordered, lowered and
replayed with the same costs and message times; what needs more memory than allowed is out. The same input
gives the same answer on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..collecting import without_gc
from ..order.schedules import compute_order
from ..step.actions import ActionKind
from ..step.lowering import Schedule, lower
from ..step.recorded_cost import RecordedCost
from ..step.segments import SegmentGraph
from ..step.simulate import Simulation, simulate
from ..step.work import Costs, Policy, Work
from ..text_table import text_table

__all__ = ["Alternative", "Choice", "Outcome", "choose", "microbatches_held"]

_EPSILON = 1e-9


@dataclass(frozen=True)
class Alternative:
    """Something to try.

    Args:
        name: for the table.
        graph: of each microbatch.
        policy: the schedule.
        costs: of its segments; None: the recorded ones.
        num_pieces: of the model on each stage.
    """

    name: str
    graph: SegmentGraph
    policy: Policy
    costs: Costs | None = None
    num_pieces: int = 1


@dataclass(frozen=True)
class Outcome:
    """What has come of an alternative.

    Args:
        alternative: what was tried.
        makespan: of the step, in the unit of the costs.
        idle_share: of the stages' time, the bubble.
        peaks: what each stage needs, in the unit of the bound.
        excluded: why it cannot be taken; empty: it can.
        schedule: the lists.
        simulation: their replay.
    """

    alternative: Alternative
    makespan: float
    idle_share: float
    peaks: tuple[float, ...]
    excluded: str
    schedule: Schedule = field(repr=False, compare=False)
    simulation: Simulation = field(repr=False, compare=False)


@dataclass(frozen=True)
class Choice:
    """All alternatives: the one to take, the others that can be taken, by makespan, and the rest."""

    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        """None: nothing fits."""
        first = self.outcomes[0] if self.outcomes else None
        return None if first is None or first.excluded else first

    def table(
        self,
        *,
        time: Callable[[float], str] = "{:.4g}".format,
        peak: Callable[[float], str] = "{:.4g}".format,
    ) -> str:
        """A plain text table, the best alternative first; no newline at the end."""
        rows = []
        for outcome in self.outcomes:
            note = outcome.excluded or ("taken" if outcome is self.best else self._too_little(outcome))
            most = peak(max(outcome.peaks, default=0.0))
            rows.append(
                (outcome.alternative.name, time(outcome.makespan), f"{outcome.idle_share:.1%}", most, note)
            )
        return text_table(("alternative", "step", "idle", "peak", "note"), rows, left={"alternative", "note"})

    def _too_little(self, outcome: Outcome) -> str:
        """Why something faster than the best one is not it."""
        best = self.best
        if best is None or outcome.makespan >= best.makespan * (1 - _EPSILON):
            return ""
        return f"{1 - outcome.makespan / best.makespan:.1%} faster, for more pieces: too little"


def microbatches_held(schedule: Schedule) -> tuple[float, ...]:
    """The most microbatches that each stage keeps for backwards and ``W``, 1/v for each of v visits."""
    found = []
    for actions in schedule:
        last: dict[tuple[int, int], ActionKind] = {}
        for _, kind, m, visit, value, _ in actions:
            if value is None:
                last[m, visit] = kind
        visits = len({visit for _, visit in last})
        # What ends with its forward keeps nothing.
        kept = {key for key, kind in last.items() if kind is not ActionKind.FORWARD}
        held = most = 0
        for _, kind, m, visit, value, _ in actions:
            if value is None and (m, visit) in kept:
                held += kind is ActionKind.FORWARD
                held -= kind is last[m, visit]
                most = max(most, held)
        found.append(most / visits if visits else 0.0)
    return tuple(found)


@without_gc()
def choose(
    alternatives: Sequence[Alternative],
    num_microbatches: int,
    *,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
    peaks_of: Callable[[Alternative, Schedule], Sequence[float]] | None = None,
    limits: Sequence[float] | None = None,
    slack: float = 0.0,
    worth: float = 0.0,
    peak_text: Callable[[float], str] = "{:.4g}".format,
) -> Choice:
    """Tries all of them.

    Args:
        alternatives: their names differ.
        num_microbatches: all alike.
        latency_s, bytes_per_s: of messages.
        peaks_of: what each stage needs; None: see :func:`microbatches_held`.
        limits: of each stage; None: on every stage what the stage of 1F1B needs that needs most, 1F1B being
            the first alternative that is ``interleaved`` (without one: the first alternative).
        slack: the share by which a peak may be above what 1F1B needs.
        worth: the share of the time that more pieces have to save.
        peak_text: how to write a peak in a reason.
    """
    repeated = [name for name, times in Counter(a.name for a in alternatives).items() if times > 1]
    if repeated:
        raise ValueError(f"several alternatives are called {repeated[0]!r}: give each a name of its own")
    tried = [
        _tried(alternative, num_microbatches, latency_s, bytes_per_s, peaks_of)
        for alternative in alternatives
    ]
    bound = None
    if limits is None and tried:
        is_1f1b = [outcome.alternative.policy.pipeline == "interleaved" for outcome in tried]
        reference = tried[is_1f1b.index(True) if True in is_1f1b else 0]
        bound = max(reference.peaks, default=0.0) * (1 + slack)
    outcomes = []
    for outcome in tried:
        allowed = limits if limits is not None else [bound or 0.0] * len(outcome.peaks)
        if len(allowed) < len(outcome.peaks):
            raise ValueError(
                f"{len(allowed)} limits for the {len(outcome.peaks)} stages of {outcome.alternative.name!r}"
            )
        over = [
            stage
            for stage, (peak, limit) in enumerate(zip(outcome.peaks, allowed))
            if peak > limit * (1 + _EPSILON) + _EPSILON
        ]
        excluded = ""
        if over:
            stage = over[0]
            excluded = (
                f"stage {stage} needs {peak_text(outcome.peaks[stage])}, {peak_text(allowed[stage])} allowed"
            )
        outcomes.append(replace(outcome, excluded=excluded))
    # Python's sort keeps the order of what is equal.
    outcomes.sort(key=lambda outcome: (bool(outcome.excluded), outcome.makespan))
    fitting = [outcome for outcome in outcomes if not outcome.excluded]
    if fitting:
        near = [o for o in fitting if fitting[0].makespan > o.makespan * (1 - worth) or o is fitting[0]]
        taken = min(near, key=lambda outcome: outcome.alternative.num_pieces)
        outcomes = [taken, *(outcome for outcome in outcomes if outcome is not taken)]
    return Choice(tuple(outcomes))


def _tried(
    alternative: Alternative,
    num_microbatches: int,
    latency_s: float,
    bytes_per_s: float,
    peaks_of: Callable[[Alternative, Schedule], Sequence[float]] | None,
) -> Outcome:
    works = [Work(m, alternative.graph) for m in range(num_microbatches)]
    num_stages = 1 + max(segment.stage_index for segment in alternative.graph.segments)
    order = compute_order(works, alternative.policy, costs=alternative.costs, latency=latency_s)
    schedule = lower(order, works, num_stages)
    found = simulate(
        schedule,
        works,
        cost=RecordedCost(schedule, alternative.costs),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
    )
    peaks = peaks_of(alternative, schedule) if peaks_of else microbatches_held(schedule)
    return Outcome(alternative, found.makespan, found.idle_share, tuple(peaks), "", schedule, found)
