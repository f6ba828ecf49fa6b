"""``pipeline: auto``: the schedule is chosen when the first steps have shown what actions take.

The partition is there by then, and with it the schedules that suit its shape: one that runs backwards whole
and one that splits them (:mod:`smp_lite.wrapper.cutting.schedules`). Nothing but the order of actions, and
whether backwards leave gradients of parameters for later, differs between schedules, so a change of them from
one step to the next changes no result. The first two training steps run split (the first one learns what can
be split, see :mod:`.weights.deferral`), the next six whole and split in turn. What an action takes, whole and
split, is the least of the medians of its three steps: what slows a machine down for a while is not the
schedule's. Then all ranks tell each other, and each simulates the same alternatives with the same numbers
(:mod:`smp_lite.plan.choosing.choice`) and comes to the same answer: the fastest one that holds no more
microbatches than 1F1B; or, where there is a ``memory_limit``, whose bytes are within that, by what the trace
has said that a microbatch keeps
(:class:`smp_lite.plan.choosing.pieces.MemoryEstimate`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..plan.choosing.choice import Alternative, Choice, choose
from ..plan.choosing.pieces import MemoryEstimate
from ..plan.choosing.shape_choice import SECONDS
from ..plan.step.actions import ActionKind
from ..plan.step.segments import SegmentGraph
from ..plan.step.work import ActionCosts, Costs, Policy
from ..plan.units import human_bytes
from .stage.spans import Span
from .step.batches import Batch

__all__ = ["Decision", "ScheduleChooser"]

_WHOLE, _SPLIT = 0, 1
_PLAYED = (_SPLIT, _SPLIT, *(_WHOLE, _SPLIT) * 3)
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
        pipelines: the one with whole backwards, and the one that splits them.
        memory: what the partition needs; None: microbatches are counted instead.
        memory_limit: bytes of each rank, where there is ``memory``.
    """

    def __init__(
        self,
        policy: Policy,
        exchange: Callable[[Any, str], Sequence[Any]],
        *,
        pipelines: Sequence[str] = ("interleaved", "zero_bubble"),
        memory: MemoryEstimate | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self._policy = policy
        self._exchange = exchange
        self._pipelines = tuple(pipelines)
        self._memory = memory
        self._limit = memory_limit
        self._num_steps = 0
        self._durations: list[_Durations] = []
        self._graph: SegmentGraph | None = None
        self._why_not = ""

    @property
    def policy(self) -> Policy:
        """For the next step."""
        return replace(self._policy, pipeline=self._pipelines[_PLAYED[self._num_steps]])

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
        whole_name, split_name = self._pipelines
        fallback = replace(self._policy, pipeline=whole_name)
        reasons = [reason for reason, _ in found if reason]
        if reasons or self._graph is None:
            text = f"pipeline auto: {whole_name}, without a choice: {reasons[0] if reasons else 'no steps'}"
            return Decision(fallback, None, None, text)
        whole = _costs(self._graph, [_least(durations[0::2]) for _, durations in found])
        split = _costs(self._graph, [_least(durations[1::2]) for _, durations in found])
        alternatives = [
            Alternative(pipeline, self._graph, replace(self._policy, pipeline=pipeline), costs)
            for pipeline, costs in ((whole_name, whole), (split_name, split), ("simple", whole))
        ]
        choice = self._choose(alternatives, num_microbatches)
        best = choice.best
        if best is None:  # recorded, the graph is another one than the trace has made of the partition
            text = f"{self._text(choice)}\nnothing fits, by estimate: {whole_name}"
            return Decision(fallback, self._graph, whole, text)
        taken = best.alternative
        return Decision(taken.policy, self._graph, taken.costs, self._text(choice))

    def _choose(self, alternatives: Sequence[Alternative], num_microbatches: int) -> Choice:
        memory, limit = self._memory, self._limit
        messages = {"latency_s": SECONDS.latency, "bytes_per_s": SECONDS.bytes_per_unit}
        if memory is None or limit is None:
            return choose(alternatives, num_microbatches, **messages)
        return choose(
            alternatives,
            num_microbatches,
            **messages,
            peaks_of=lambda _, schedule: memory.peaks(schedule),
            limits=[limit] * len(memory.state),
            peak_text=_bytes_text,
        )

    def _text(self, choice: Choice) -> str:
        table = choice.table(
            time=lambda seconds: f"{seconds * 1e3:.1f} ms",
            peak=_held_text if self._limit is None else _bytes_text,
        )
        return f"pipeline auto, by simulation of what the first steps have taken:\n{table}"


def _held_text(held: float) -> str:
    return f"{held:g} microbatches"


def _bytes_text(num_bytes: float) -> str:
    return human_bytes(round(num_bytes))


def _least(of_steps: Sequence[_Durations]) -> _Durations:
    return {key: min(durations[key] for durations in of_steps) for key in of_steps[0]}


def _costs(graph: SegmentGraph, of_ranks: Sequence[_Durations]) -> Costs:
    """The median over the ranks that play a stage; what the library does between actions comes to it."""
    found: dict[tuple[int, int], ActionCosts] = {}
    for segment in graph.segments:
        place = (segment.stage_index, segment.visit)
        seconds = []
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT):
            times = [durations[key] for durations in of_ranks if (key := (*place, kind.value)) in durations]
            seconds.append(statistics.median(times) if times else 0.0)
        messages = len(segment.imports) + len(segment.exports)
        around = (SECONDS.action * (1 + messages), SECONDS.action * (1 + messages), SECONDS.action)
        found[place] = ActionCosts(*[own + more if own else 0.0 for own, more in zip(seconds, around)])
    return found
