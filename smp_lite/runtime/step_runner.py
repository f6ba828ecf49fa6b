"""One step on one process: plan what was recorded, execute it, make the results known.

The runner is the recorder's host. Where Python needs a number while recording, it executes everything
recorded so far as a *batch of work* and recording goes on; the rest is the last batch. Nearly always there
is just the one. Forwards run in recorded order of microbatches in any case. Backwards of microbatches that
are recorded to their end run with the next batch, except under ``simple``, where they all come last.

Plans are kept: a step whose recordings have the same structure as an earlier one's is not planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.peers import Check, Peers
from ..errors import SMPError
from ..plan.actions import ActionKind
from ..plan.lowering import Schedule, lower
from ..plan.schedules import Policy, Work, compute_order
from ..record.calls import ResultMeta
from ..record.metadata import describe_result
from ..record.recorder import Recorder
from ..record.recording import Command, Recording, describe_command
from .executor import StageExecutor
from .gradients import GradientBooks
from .microbatch import MicrobatchState
from .random_streams import RandomStreams


@dataclass(frozen=True)
class Batch:
    """A planned batch of work; frozen, kept, and found again by its key."""

    works: tuple[Work, ...]
    schedule: Schedule


@dataclass
class _Progress:
    """What has been executed of one microbatch, on all stages."""

    recording: Recording
    forward_done: set[int] = field(default_factory=set)  # first commands of segments
    backward_done: set[int] = field(default_factory=set)
    sent: set[tuple[int, int]] = field(default_factory=set)


class StepRunner:
    """Executes steps for the stages that this process plays.

    Args:
        num_stages: stages in all.
        peers: the mp group.
        policy: the schedule's.
        executors: for each stage played here.
        books: for each stage played here.
        streams: random seeds, shared with the executors.
    """

    def __init__(
        self,
        num_stages: int,
        peers: Peers,
        policy: Policy,
        executors: dict[int, StageExecutor],
        books: dict[int, GradientBooks],
        streams: RandomStreams,
    ) -> None:
        self.num_stages = num_stages
        self.peers = peers
        self.policy = policy
        self.executors = executors
        self.books = books
        self.streams = streams
        self.last_batch: Batch | None = None
        self.on_planned: Callable[[Batch, dict[int, Recording]], None] | None = None
        self._plans: dict[Any, Batch] = {}
        self._progress: dict[int, _Progress] = {}
        self._recorder: Recorder | None = None
        self._real: list[torch.Tensor | None] = []
        self._in_transit: list[Any] = []
        self._inputs: tuple[int, Callable[[], list[str]]] = (0, list)
        self._start_state = 0

    # The life of a step -----------------------------------------------------------------------------------

    def begin_step(
        self,
        recorder: Recorder,
        gradient_scale: float,
        inputs: tuple[int, Callable[[], list[str]]] = (0, list),
    ) -> None:
        """Parameters are seen placed from here to :meth:`finish` or :meth:`abandon`.

        Args:
            recorder: whose host this is for the step.
            gradient_scale: what each backward starts with instead of 1.
            inputs: a digest of the batch, compared between ranks, and its description; 0: not compared.
        """
        self._recorder = recorder
        recorder.begin_step()
        self._inputs = inputs
        self._start_state = self.streams.begin_step()
        for executor in self.executors.values():
            executor.gradient_scale = gradient_scale
            executor.spans.clear()
        self._progress.clear()
        self._real = recorder.placement.swap_in()

    def add(self, recording: Recording) -> None:
        """A microbatch begins to be recorded."""
        m = recording.microbatch_index
        self._progress[m] = _Progress(recording)
        for executor in self.executors.values():
            executor.states[m] = MicrobatchState(recording)

    def finish(self, outputs: Sequence[tuple[int, int]], *, keep_graph: bool = False) -> list[torch.Tensor]:
        """Executes what is left; returns the data of (microbatch, value) outputs, on every rank.

        Each recording's ``needed`` must name its outputs from the moment it is complete. With
        ``keep_graph`` the rank that made an output gets it with its autograd graph.
        """
        recorder = self._recorder
        assert recorder is not None
        recorder.placement.swap_out(self._real)
        self._real = []
        recorder.suspended = True
        try:
            self._execute(last_batch=True)
            items = []
            for m, value in outputs:
                home = self._progress[m].recording.values[value]
                executor = self.executors.get(home.stage_index)
                tensor = executor.states[m].data[value] if executor else None
                items.append((home.stage_index, home.meta, tensor))
            found = self.peers.share(items)
            if keep_graph:
                found = [t if t is not None else f for f, (_, _, t) in zip(found, items, strict=True)]
            return found
        finally:
            recorder.suspended = False
            self._end(recorder)

    def abandon(self) -> None:
        """The step failed: lets go of everything but the memory that a wire may still write into."""
        recorder = self._recorder
        if recorder is not None:
            self._in_transit += [executor.in_transit() for executor in self.executors.values()]
            if self._real:
                recorder.placement.swap_out(self._real)
                self._real = []
            self._end(recorder)

    def _end(self, recorder: Recorder) -> None:
        if any(progress.recording.draws for progress in self._progress.values()):
            self.streams.move_on()
        recorder.end_step()
        self._recorder = None
        for executor in self.executors.values():
            executor.end_step()
        for books in self.books.values():
            books.end_step()
        self._progress.clear()
        self._inputs = (0, list)  # it holds the batch

    # Host of the recorder -----------------------------------------------------------------------------------

    def run_for_real(self, recording: Recording, command: Command) -> ResultMeta:
        self._execute_now()
        m, stage = recording.microbatch_index, command.stage_index
        meta: ResultMeta | None = None
        executor = self.executors.get(stage)
        if executor is not None:
            state = executor.states[m]
            given, result, drew = executor.result_of(command)
            leaves = state.leaves[command.index]
            meta = describe_result(result, given, [leaves.get(s) for s in command.sources], draws=drew)
        meta = self.peers.share_object(meta, stage, f"the result of {command.label}")
        assert meta is not None
        if executor is not None:
            executor.adopt_later(executor.states[m], command)
        return meta

    def fetch(self, recording: Recording, values: list[int]) -> list[torch.Tensor]:
        m = recording.microbatch_index
        recording.needed.update(values)
        self._execute_now()
        items = []
        for value in values:
            home = recording.values[value]
            executor = self.executors.get(home.stage_index)
            tensor = None
            if executor is not None:
                tensor = executor.states[m].data.get(value)
                if tensor is None:
                    raise SMPError("a value of an earlier microbatch is gone: return it from the step")
            items.append((home.stage_index, home.meta, tensor))
        return self.peers.share(items)

    def _execute_now(self) -> None:
        """Executes what is recorded so far, in the midst of recording."""
        recorder = self._recorder
        assert recorder is not None
        suspended = recorder.suspended
        recorder.placement.swap_out(self._real)
        recorder.suspended = True
        try:
            self._execute(last_batch=False)
        finally:
            recorder.suspended = suspended
            self._real = recorder.placement.swap_in()

    # Planning and executing ---------------------------------------------------------------------------------

    def _execute(self, *, last_batch: bool) -> None:
        batch = self._plan(last_batch)
        recordings = {m: progress.recording for m, progress in self._progress.items()}
        if last_batch and self.on_planned is not None:
            self.on_planned(batch, recordings)
        self._compare(recordings, last_batch=last_batch)
        for executor in self.executors.values():
            executor.adopt()
        for work in batch.works:
            for stage, executor in self.executors.items():
                executor.states[work.microbatch_index].update(work.graph, stage)
        for stage, books in self.books.items():
            books.plan(batch.works, recordings, batch.schedule[stage], stage, last_batch=last_batch)
        with self.streams.executing():
            self.peers.drive(
                {stage: executor.run(batch.schedule[stage]) for stage, executor in self.executors.items()}
            )
        self._note(batch)
        self.last_batch = batch

    def _plan(self, last_batch: bool) -> Batch:
        backwards_last = self.policy.pipeline == "simple" and not last_batch
        key = (
            last_batch,
            self.policy,
            tuple(
                (
                    m,
                    progress.recording.plan_key(),
                    progress.recording.complete,
                    frozenset(progress.forward_done),
                    frozenset(progress.backward_done),
                    frozenset(progress.sent),
                )
                for m, progress in self._progress.items()
            ),
        )
        if key not in self._plans:
            works = []
            graphs: dict[Any, Any] = {}
            for m, progress in self._progress.items():
                plan_key = progress.recording.plan_key()
                if plan_key not in graphs:
                    graphs[plan_key] = progress.recording.graph()
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
            order = compute_order(works, self.policy)
            sent = {m: frozenset(progress.sent) for m, progress in self._progress.items()}
            schedule = lower(order, works, self.num_stages, sent=sent)
            self._plans[key] = Batch(tuple(works), schedule)
        return self._plans[key]

    def _note(self, batch: Batch) -> None:
        """Everything in the batch has run, on all stages."""
        for work in batch.works:
            progress = self._progress[work.microbatch_index]
            progress.forward_done |= {s.commands[0] for s in work.graph.segments}
            progress.backward_done |= {s.commands[0] for s in work.pending_backwards()}
        for actions in batch.schedule:
            for action in actions:
                if action.kind is ActionKind.SEND_FORWARD:
                    assert action.value is not None and action.peer is not None
                    self._progress[action.microbatch_index].sent.add((action.value, action.peer))

    def _compare(self, recordings: dict[int, Recording], *, last_batch: bool) -> None:
        """All mp ranks must have recorded the same, from the same batch and random numbers."""

        def calls() -> list[str]:
            return [
                f"recorded call {number} of microbatch {m} = {describe_command(command, recording)}"
                for m, recording in recordings.items()
                for number, command in enumerate(recording.commands)
            ]

        recorded = hash(tuple(recording.digest for recording in recordings.values()))
        checks = [Check("the recording of a step", recorded, calls)]
        if last_batch:
            checks.append(Check("the batch of a step", *self._inputs))
            checks.append(
                Check(
                    "the random numbers drawn in a step function",
                    self._start_state if self.drew() else 0,
                    lambda: [f"has the random state {self._start_state:x}"],
                )
            )
        self.peers.compare(checks)

    def drew(self) -> bool:
        """Whether the user's function drew random numbers in this step."""
        return self.streams.state_digest() != self._start_state

    def spans(self) -> dict[int, list[Any]]:
        """For each stage here, when its forwards and backwards ran in the last step."""
        return {stage: list(executor.spans) for stage, executor in self.executors.items()}
