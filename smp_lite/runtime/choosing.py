"""``pipeline: auto``: the schedule is chosen when the first steps have shown what actions take.

Nothing but the order of actions, and whether backwards leave gradients of parameters for later, differs
between schedules, so a change of them from one step to the next changes no result. The first two training
steps run under ``zero_bubble`` (the first one learns what can be split, see :mod:`.weights.deferral`), the
third one under ``interleaved``, the fourth one split again; the medians of the last two are what each action
takes whole, and split. Then all ranks tell each other, and each simulates the same alternatives with the same
numbers (:mod:`smp_lite.plan.choice`) and comes to the same answer: the fastest one that holds no more
microbatches than 1F1B.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..plan.actions import ActionKind
from ..plan.choice import Alternative, Choice, choose
from ..plan.segments import SegmentGraph
from ..plan.work import ActionCosts, Costs, Policy
from .batches import Batch
from .executor import Span

__all__ = ["Decision", "ScheduleChooser"]

_WHOLE, _SPLIT = "interleaved", "zero_bubble"
_PLAYED = (_SPLIT, _SPLIT, _WHOLE, _SPLIT)
_MEASURED_FROM = 2

_Durations = dict[tuple[int, int, str], float]
"""Seconds by (stage, visit, kind of action)."""


class Decision(NamedTuple):
    """What was chosen.

    Attributes:
        policy: for the steps to come.
        graph: of the microbatches that were measured; None: nothing could be measured.
        costs: of its actions, in seconds.
        text: for the user.
    """

    policy: Policy
    graph: SegmentGraph | None
    costs: Costs | None
    text: str


class ScheduleChooser:
    """Counts the first training steps, measures them, and decides.

    Args:
        policy: what ``optimize`` and ``active_microbatches`` say.
        exchange: gives every rank's object to all ranks of the job, under a name; collective.
    """

    def __init__(self, policy: Policy, exchange: Callable[[Any, str], Sequence[Any]]) -> None:
        self._policy = policy
        self._exchange = exchange
        self._num_steps = 0
        self._durations: list[_Durations] = []
        self._graph: SegmentGraph | None = None
        self._why_not = ""

    @property
    def policy(self) -> Policy:
        """For the next step."""
        return replace(self._policy, pipeline=_PLAYED[self._num_steps])

    def after_step(self, batch: Batch, spans: Mapping[int, Sequence[Span]]) -> Decision | None:
        """A training step has ended on all ranks; collective when it was the last one to be measured."""
        if self._num_steps >= _MEASURED_FROM:
            self._measure(batch, spans)
        self._num_steps += 1
        if self._num_steps < len(_PLAYED):
            return None
        found = self._exchange((self._why_not, self._durations), "the choice of a schedule")
        return self._decide(found, len(batch.works))

    def _measure(self, batch: Batch, spans: Mapping[int, Sequence[Span]]) -> None:
        first = batch.works[0]
        is_whole_step = all(
            work.complete and not work.forward_done and not work.backward_done and work.graph == first.graph
            for work in batch.works
        )
        if not is_whole_step:
            self._why_not = "microbatches are not alike, or are looked at while they are recorded"
        elif self._graph is not None and self._graph != first.graph:
            self._why_not = "steps are not alike"
        elif not any(segment.has_backward for segment in first.graph.segments):
            self._why_not = "the steps have no backward"
        self._graph = first.graph
        seconds: dict[tuple[int, int, str], list[float]] = {}
        for own in spans.values():
            for span in own:
                key = (span.action.stage_index, span.action.visit, span.action.kind.value)
                seconds.setdefault(key, []).append(span.end_s - span.start_s)
        self._durations.append({key: statistics.median(times) for key, times in seconds.items()})

    def _decide(self, found: Sequence[tuple[str, list[_Durations]]], num_microbatches: int) -> Decision:
        fallback = replace(self._policy, pipeline=_WHOLE)
        reasons = [reason for reason, _ in found if reason]
        if reasons or self._graph is None:
            text = f"pipeline auto: interleaved, without a choice: {reasons[0] if reasons else 'no steps'}"
            return Decision(fallback, None, None, text)
        whole = _costs(self._graph, [durations[0] for _, durations in found])
        split = _costs(self._graph, [durations[1] for _, durations in found])
        alternatives = [
            Alternative(name, self._graph, replace(self._policy, pipeline=pipeline), costs)
            for name, pipeline, costs in (
                ("interleaved", _WHOLE, whole),
                ("zero_bubble", _SPLIT, split),
                ("simple", "simple", whole),
            )
        ]
        choice = choose(alternatives, num_microbatches)
        best = choice.best
        assert best is not None, "the bound is what the first alternative needs"
        taken = best.alternative
        return Decision(taken.policy, self._graph, taken.costs, _text(choice))


def _text(choice: Choice) -> str:
    table = choice.table(
        time=lambda seconds: f"{seconds * 1e3:.1f} ms", peak=lambda held: f"{held:g} microbatches"
    )
    return f"pipeline auto, by simulation of what the first steps have taken:\n{table}"


def _costs(graph: SegmentGraph, of_ranks: Sequence[_Durations]) -> Costs:
    """The median over the ranks that play a stage."""
    found: dict[tuple[int, int], ActionCosts] = {}
    for segment in graph.segments:
        place = (segment.stage_index, segment.visit)
        seconds = []
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT):
            times = [durations[key] for durations in of_ranks if (key := (*place, kind.value)) in durations]
            seconds.append(statistics.median(times) if times else 0.0)
        found[place] = ActionCosts(*seconds)
    return found
