"""Batches of work: what of a step's microbatches is executed next, planned once and found again.

Where recording is interrupted, a part of a microbatch has run when the rest is planned: :class:`Progress`
says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...plan.order.schedules import Policy, Work, compute_order
from ...plan.step.actions import ActionKind
from ...plan.step.lowering import Schedule, lower
from ...plan.step.segments import SegmentGraph
from ...plan.step.work import Costs
from ...record.commands.changed_views import refuse_views_summed_apart
from ...record.commands.recording import Recording
from ..stage.microbatch import StagePart

__all__ = ["Batch", "BatchPlanner", "Progress"]

_MOST_ALIKE = 256


class _Done(NamedTuple):
    """What a batch executes of one microbatch, on all stages; as in :class:`Progress`."""

    microbatch_index: int
    forward: frozenset[int]
    backward: frozenset[int]
    sent: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Batch:
    """A planned batch of work; frozen, kept, and found again by its key."""

    works: tuple[Work, ...]
    schedule: Schedule
    parts: dict[tuple[int, int], StagePart] = field(default_factory=dict, compare=False, repr=False)
    cuts: dict[int, Batch] = field(default_factory=dict, compare=False, repr=False)
    _outcome: list[_Done] = field(default_factory=list, compare=False, repr=False)

    def part(self, graph: SegmentGraph, stage_index: int) -> StagePart:
        """A stage's part of one of the works' graphs."""
        key = (id(graph), stage_index)
        if key not in self.parts:
            self.parts[key] = StagePart(graph, stage_index)
        return self.parts[key]

    def outcome(self) -> list[_Done]:
        """What has been executed, microbatch by microbatch, when all of it has run."""
        if not self._outcome:
            sent: dict[int, set[tuple[int, int]]] = {work.microbatch_index: set() for work in self.works}
            for actions in self.schedule:
                for action in actions:
                    if action.kind is ActionKind.SEND_FORWARD:
                        assert action.value is not None and action.peer is not None
                        sent[action.microbatch_index].add((action.value, action.peer))
            for work in self.works:
                m = work.microbatch_index
                forward = frozenset(s.commands[0] for s in work.graph.segments)
                backward = frozenset(s.commands[0] for s in work.pending_backwards())
                self._outcome.append(_Done(m, forward, backward, frozenset(sent[m])))
        return self._outcome

    def until(self, microbatch_index: int) -> Batch:
        """What there is of it before that microbatch; always the same object."""
        if microbatch_index not in self.cuts:
            works = tuple([work for work in self.works if work.microbatch_index < microbatch_index])
            schedule = [
                [action for action in actions if action.microbatch_index < microbatch_index]
                for actions in self.schedule
            ]
            self.cuts[microbatch_index] = Batch(works, schedule)
        return self.cuts[microbatch_index]


@dataclass
class Progress:
    """What has been executed of one microbatch, on all stages."""

    recording: Recording
    forward_done: set[int] = field(default_factory=set)  # first commands of segments
    backward_done: set[int] = field(default_factory=set)
    sent: set[tuple[int, int]] = field(default_factory=set)


class BatchPlanner:
    """Plans batches of one model's steps.

    A step whose recordings have the same structure as an earlier one's is not planned again.

    Args:
        num_stages: stages in all.
        policy: the schedule's.
    """

    def __init__(self, num_stages: int, policy: Policy) -> None:
        self.num_stages = num_stages
        self.policy = policy
        self._measured: tuple[SegmentGraph, Costs] | None = None
        self._plans: dict[Any, Batch] = {}
        self._of_alike: dict[Any, Batch] = {}

    def use(self, policy: Policy, graph: SegmentGraph | None = None, costs: Costs | None = None) -> None:
        """From now on another policy; ``costs`` are what was measured of microbatches with that graph."""
        self.policy = policy
        self._measured = None if graph is None or costs is None else (graph, costs)
        self._plans = {key: batch for key, batch in self._plans.items() if key[0] != policy}
        self._of_alike.clear()

    def plan(self, all_progress: Mapping[int, Progress], *, last_batch: bool) -> Batch:
        """Everything recorded that has not run, by microbatch; backwards under ``simple`` only at the end."""
        backwards_last = self.policy.pipeline == "simple" and not last_batch
        key = (
            self.policy,
            last_batch,
            tuple(
                (
                    m,
                    progress.recording.plan_key(),
                    progress.recording.complete,
                    frozenset(progress.forward_done),
                    frozenset(progress.backward_done),
                    frozenset(progress.sent),
                )
                for m, progress in all_progress.items()
            ),
        )
        if key not in self._plans:
            works = []
            graphs: dict[Any, Any] = {}
            for m, progress in all_progress.items():
                plan_key = progress.recording.plan_key()
                if plan_key not in graphs:
                    graph = graphs[plan_key] = progress.recording.graph()
                    refuse_views_summed_apart(progress.recording, graph)
                graph = graphs[plan_key]
                works.append(
                    Work(
                        microbatch_index=m,
                        graph=graph,
                        forward_done=frozenset(
                            s.index for s in graph.segments if s.commands[0] in progress.forward_done
                        ),
                        backward_done=frozenset(
                            s.index for s in graph.segments if s.commands[0] in progress.backward_done
                        ),
                        complete=progress.recording.complete and not backwards_last,
                    )
                )
            order = compute_order(works, self.policy, costs=self._costs_of(works))
            sent = {m: frozenset(progress.sent) for m, progress in all_progress.items()}
            schedule = lower(order, works, self.num_stages, sent=sent)
            self._plans[key] = Batch(tuple(works), schedule)
        return self._plans[key]

    def known(self, first: Recording, num_microbatches: int) -> Batch | None:
        """The batch of a whole step whose microbatches are all like this one, if one has run before."""
        return self._of_alike.get(_alike_key(first, num_microbatches))

    def note_alike(self, batch: Batch, all_progress: Mapping[int, Progress]) -> None:
        """The batch is a whole step and has run: if all its microbatches are alike, it is :meth:`known`."""
        recordings = [progress.recording for progress in all_progress.values()]
        keys = {_alike_key(recording, len(recordings)) for recording in recordings}
        is_whole = not any(recording.epoch for recording in recordings)
        if len(keys) == 1 and is_whole and len(recordings) > 1:
            if len(self._of_alike) >= _MOST_ALIKE:  # on all ranks at once: they record the same
                self._of_alike.clear()
            self._of_alike[keys.pop()] = batch

    def forget_alike(self, first: Recording, num_microbatches: int) -> None:
        """A step that began with such a microbatch had others."""
        self._of_alike.pop(_alike_key(first, num_microbatches), None)

    def _costs_of(self, works: Sequence[Work]) -> Costs | None:
        if self._measured is None or any(work.graph != self._measured[0] for work in works):
            return None
        return self._measured[1]

    @staticmethod
    def note(batch: Batch, all_progress: Mapping[int, Progress]) -> None:
        """Everything in the batch has run, on all stages."""
        for done in batch.outcome():
            progress = all_progress[done.microbatch_index]
            progress.forward_done |= done.forward
            progress.backward_done |= done.backward
            progress.sent |= done.sent


def _alike_key(recording: Recording, num_microbatches: int) -> tuple[Any, ...]:
    return recording.digest, recording.plan_key(), num_microbatches
