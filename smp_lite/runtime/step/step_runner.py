"""One step on one process: plan what was recorded, execute it, make the results known.

The runner is the recorder's host. Where Python needs a number while recording, it executes everything
recorded so far as a *batch of work* and recording goes on; the rest is the last batch. Nearly always there
is just the one, which starts while it is recorded if it is known (:mod:`..stage.ahead`). Forwards run in
recorded order of microbatches in any case. Backwards of microbatches that are recorded to their end run with
the next batch, except under ``simple``, where they all come last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...alike_between import BetweenSteps
from ...comm.groups.peers import Peers
from ...comm.groups.stage_peers import StagePeers
from ...devices import home
from ...errors import PeerFailed, SMPError, SMPTimeout
from ...plan.order.schedules import Policy
from ...record.commands.recording import Command, Recording
from ...record.describe.metadata import describe_result
from ...record.interception import not_listening
from ...record.parameters.placement import Placement
from ...record.state.ambient import users_modes, without_users_modes
from ...record.step.recorder import Recorder
from ...record.values.calls import ResultMeta
from ...record.values.placed import PlacedTensor, TensorMeta
from ..stage.executor import StageExecutor
from ..stage.failure import Failure, step_failure
from ..stage.gradients import GradientBooks
from ..stage.microbatch import MicrobatchState
from ..stage.random_streams import RandomStreams
from .batches import Batch, BatchPlanner, Progress
from .comparing import ALL, CUT_AT, LOOKS, ONE, checks
from .running_list import RunningList
from .step_results import StepResults
from .trained import TrainedParameters


class StepRunner:
    """Executes steps for the stages that this process plays.

    Args:
        num_stages: stages in all.
        peers: the mp group.
        policy: the schedule's.
        executors: for each stage played here.
        books: for each stage played here.
        streams: random seeds, shared with the executors.
        stage_peers: the ranks that share the stage; None where there are no others.
        between: what the script does between steps.
    """

    def __init__(
        self,
        num_stages: int,
        peers: Peers,
        policy: Policy,
        executors: dict[int, StageExecutor],
        books: dict[int, GradientBooks],
        streams: RandomStreams,
        stage_peers: StagePeers | None = None,
        between: BetweenSteps | None = None,
    ) -> None:
        self.peers = peers
        self._between = between if between is not None else BetweenSteps()
        self._stage_peers = stage_peers
        self.executors = executors
        self.books = books
        self.streams = streams
        self.last_batch: Batch | None = None
        self.on_planned: Callable[[Batch, dict[int, Recording]], None] | None = None
        self.observer: Callable[[], Any] = lambda: None  # sees each command that runs; see smp_lite.check
        self.planner = BatchPlanner(num_stages, policy)
        self._trained = TrainedParameters()
        self._progress: dict[int, Progress] = {}
        self.losses: list[torch.Tensor] = []
        """Single numbers at which backwards of the last step that was looked at began here."""
        self._recorder: Recorder | None = None
        self.results = StepResults(peers, executors, num_stages)
        self._in_transit: list[Any] = []
        self._inputs: tuple[int, Callable[[], list[str]]] = (0, list)
        self._start_state = 0
        self._modes_around: list[Any] = []
        self._has_failed: SMPError | None = None  # in this step, whatever the script did about it
        self._touched_gradients = False  # by a list of actions that failed
        self._has_moved_on = False  # what the script draws next, past what calls of this step draw
        self.all_know = False  # whether an error that is on its way is raised on all mp ranks
        self._kept_by_all: frozenset[tuple[int, int]] = frozenset()  # (microbatch, value)
        self.may_run_ahead = False
        self.drops_with_replicas = False  # gradients, if this step fails, whether a backward has run or not
        self._is_awaited = False  # by ranks that have come to the next comparison, or will
        self._running: RunningList | None = None  # the list of this step that runs while it is recorded

    # The life of a step -----------------------------------------------------------------------------------

    def begin_step(
        self,
        recorder: Recorder,
        num_microbatches: int,
        gradient_scale: float,
        inputs: tuple[int, Callable[[], list[str]]] = (0, list),
    ) -> None:
        """Parameters are seen placed from here to :meth:`finish` or :meth:`abandon`.

        Args:
            recorder: whose host this is for the step.
            num_microbatches: how many there will be.
            gradient_scale: what each backward starts with instead of 1.
            inputs: a digest of the batch, compared between ranks, and its description; 0: not compared, nor
                is anything else that need not be looked at in every step.
        """
        self._recorder = recorder
        recorder.begin_step(num_microbatches, strict=inputs[0] != 0)
        self._inputs = inputs
        self.results.forget()
        self._modes_around = users_modes()
        self.all_know = self._touched_gradients = self._has_moved_on = False
        self._has_failed = None
        self._is_awaited = True
        shared = (
            self._stage_peers if self._stage_peers is not None and self._stage_peers.share_batch else None
        )
        self._start_state = self.streams.begin_step(None if shared is None else shared.of_first)
        for executor in self.executors.values():
            executor.gradient_scale = gradient_scale
            executor.spans.clear()
        self._progress.clear()
        recorder.placement.swap_in()

    def add(self, recording: Recording) -> None:
        """A microbatch begins to be recorded."""
        m = recording.microbatch_index
        self._progress[m] = Progress(recording)
        for executor in self.executors.values():
            # Not in every step: on a device, to read them is to wait for it.
            executor.states[m] = MicrobatchState(recording, losses={} if self._inputs[0] else None)

    def finish(self, outputs: Sequence[tuple[int, int]], *, keep_graph: bool = False) -> list[torch.Tensor]:
        """Executes what is left; returns the data of (microbatch, value) outputs, on every rank.

        Each recording's ``needed`` must name its outputs from the moment it is complete. For
        ``keep_graph`` see :meth:`StepResults.share`.
        """
        recorder = self._recorder
        assert recorder is not None
        recorder.placement.swap_out()
        recorder.suspended = True
        try:
            recorder.placement.end_recording()
            self._execute_last()
            self._is_awaited = False
            recorder.buffers.seen.end_recording()
            self.losses = self._losses()
            # What the script keeps on some of the ranks only has no data: those that do not could not know.
            survivors = [(m, p) for m, p in recorder.survivors if (m, p.smp_value) in self._kept_by_all]
            return self.results.share(outputs, survivors, self._progress, keep_graph=keep_graph)
        except Exception as error:
            self._give_up(error)
            self._tell(error)
            self._undo()
            raise
        finally:
            recorder.suspended = False
            self._end(recorder)

    def _losses(self) -> list[torch.Tensor]:
        states = (
            state for executor in self.executors.values() for _, state in sorted(executor.states.items())
        )
        return [loss for state in states for _, loss in sorted((state.losses or {}).items())]

    def abandon(self, error: BaseException | None = None) -> None:
        """The step failed: tells the other ranks, unless they know, and lets go of everything but the memory
        that a wire may still write into."""
        recorder = self._recorder
        if recorder is not None:
            recorder.placement.swap_out()
            recorder.suspended = True  # an action that had been waiting runs on with real parameters
            try:
                if error is not None:
                    self._give_up(error)
            finally:
                recorder.suspended = False
            self._tell(error)
            if self._undo() and isinstance(error, Exception) and not isinstance(error, SMPError):
                error.add_note(
                    "smp: the step had begun to run, so gradients are None, those of earlier steps too"
                )
            self._in_transit += [executor.transfers.under_way() for executor in self.executors.values()]
            recorder.placement.strange.clear()
            self._end(recorder)

    def _tell(self, error: BaseException | None) -> None:
        """Other ranks wait for this one where all compare what they have recorded: it does not come."""
        if not self._is_awaited or self.all_know:
            return
        if isinstance(error, Exception) and not isinstance(error, SMPTimeout):
            self._is_awaited = False
            self._move_streams_on()  # those that hear of it draw on from here
            self.peers.fail(f"{type(error).__name__}: {error}")

    def _end(self, recorder: Recorder) -> None:
        self._move_streams_on()
        recorder.end_step()
        self._recorder = None
        self._running = None
        for executor in self.executors.values():
            executor.end_step()
        for books in self.books.values():
            books.end_step()
        self._progress.clear()
        self._inputs = (0, list)  # it holds the batch

    def _move_streams_on(self) -> None:
        """Once a step, where calls of it draw."""
        if self._has_moved_on:
            return
        self._has_moved_on = True
        if any(progress.recording.draws for progress in self._progress.values()):
            self.streams.move_on()

    # Host of the recorder -----------------------------------------------------------------------------------

    def share_late(self, placed: PlacedTensor) -> torch.Tensor:
        return self.results.share_late(placed)

    def run_for_real(self, recording: Recording, command: Command) -> ResultMeta | str:
        self._execute_now()
        m, stage = recording.microbatch_index, command.stage_index
        found: ResultMeta | str | None = None
        executor = self.executors.get(stage)
        if executor is not None:
            state = executor.states[m]
            run = executor.result_of(command)
            leaves = state.leaves[command.index]
            with torch._C.DisableTorchFunction():  # no calls of the script's
                found = run.effect or describe_result(
                    run.result,
                    run.tensors,
                    [leaves.get(s) for s in command.sources],
                    buffers=run.buffers,
                    states=run.states,
                    draws=run.drew,
                )
        found = self.peers.share_object(found, stage, f"the result of {command.label}")
        assert found is not None
        if executor is not None and isinstance(found, str):
            executor.forget(command)
        elif executor is not None:
            executor.adopt_later(executor.states[m], command)
        if isinstance(found, str):
            command.meta = ResultMeta(spec=("tuple",), leaves=())
        return found

    def share(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        own = tensor if stage in self.executors else None
        # Elsewhere it may be away, without memory.
        meta = TensorMeta.of(tensor)._replace(requires_grad=False, device=home())
        with self._unheard():
            (data,) = self.peers.share([(stage, meta, own)])
        return data if own is None else own

    def fetch(self, recording: Recording, values: list[int]) -> list[torch.Tensor]:
        m = recording.microbatch_index
        recording.needed.update(values)
        self._execute_now()
        items = []
        for value in values:
            made = recording.values[value]
            executor = self.executors.get(made.stage_index)
            tensor = None
            if executor is not None:
                tensor = executor.states[m].data.get(value)
                if tensor is None:
                    raise SMPError("a value of an earlier microbatch is gone: return it from the step")
            items.append((made.stage_index, made.meta, tensor))
        with self._unheard():
            return self.peers.share(items)

    def settle(self) -> None:
        if self._running is not None:
            with self._suspended():
                self._cut()

    def _execute_now(self) -> None:
        """Executes what is recorded so far, in the midst of recording."""
        with self._suspended():
            if self._running is not None:
                self._cut()
            self._execute(last_batch=False)

    @contextlib.contextmanager
    def _suspended(self) -> Iterator[None]:
        """Within: the modules are as they are, and nothing is recorded."""
        recorder = self._recorder
        assert recorder is not None
        recorder.placement.swap_out()
        try:
            with self._unheard():
                yield
        finally:
            recorder.placement.swap_in()

    @contextlib.contextmanager
    def _unheard(self) -> Iterator[None]:
        """Within: nothing is recorded; each rank does something else."""
        recorder = self._recorder
        assert recorder is not None
        suspended, recorder.suspended = recorder.suspended, True
        try:
            yield
        finally:
            recorder.suspended = suspended

    # A step that runs while it is recorded: see .ahead ------------------------------------------------------

    def recorded(self, recording: Recording) -> None:
        """A microbatch has been recorded to its end, and another one comes: what is known runs meanwhile."""
        recorder = self._recorder
        assert recorder is not None
        if self._running is None:
            if recording.microbatch_index == 0:
                self._start_ahead(recording)
        elif not self._running.accepts(recording):
            with self._suspended():
                self._cut()
        elif not recorder.backward_state.runs_python and self._running.is_due() and self._could_compute():
            with self._suspended():
                self._burst()

    def _could_compute(self) -> bool:
        """Goes on with transfers; returns whether something else could run now."""
        running, recorder = self._running, self._recorder
        assert running is not None and recorder is not None
        recorder.suspended = True
        try:
            return running.could_compute()
        finally:
            recorder.suspended = False

    def _burst(self) -> None:
        """Runs what can run without waiting."""
        assert self._running is not None
        self._before_running(all_recorded=False)
        with not_listening(), self._executing(seeds=self._running.draws):
            self._running.burst()

    def _start_ahead(self, first: Recording) -> None:
        """Starts the list of the step, if it is known on all ranks."""
        recorder = self._recorder
        assert recorder is not None
        if not self.may_run_ahead or self._inputs[0] or self.on_planned is not None:
            return
        if self.observer() is not None or recorder.backward_state.runs_python or first.inputs:
            return
        batch = self.planner.known(first, recorder.num_microbatches)
        if batch is None:
            return
        with self._suspended():
            if self._compare({first.microbatch_index: first}, ONE, ahead=True):
                for executor in self.executors.values():
                    executor.observe(None)
                self._touched_gradients = any(work.pending_backwards() for work in batch.works)
                self._running = RunningList(batch, first, self.peers, self.executors, self.books)
                self._burst()

    def _cut(self) -> None:
        """What the list has begun runs to its end; what is recorded from now on is planned anew."""
        running = self._running
        assert running is not None and self._recorder is not None
        k = running.ahead.num_recorded
        self._before_running(all_recorded=False)
        self._running = None
        self.planner.forget_alike(running.ahead.first, running.ahead.num_microbatches)
        with self._executing():
            running.end(cut=k)
        try:
            self._compare({m: p.recording for m, p in self._progress.items() if m < k}, CUT_AT + k)
            self._conclude(running.batch.until(k))
            self._recorder.modules.look_between()
        except SMPError as error:
            self._has_failed = error
            raise

    def _end_ahead(self) -> None:
        """All has been recorded: the list runs to its end."""
        running = self._running
        assert running is not None
        self._before_running()
        self._running = None
        with self._executing(seeds=running.draws):
            running.end()
        self._compare({m: progress.recording for m, progress in self._progress.items()}, ALL)
        self._conclude(running.batch)

    def _give_up(self, error: BaseException) -> None:
        """The step function has failed: makes the transfers that other ranks count on."""
        running, self._running = self._running, None
        if running is None or not running.is_intact or not isinstance(error, Exception):
            return
        try:
            with self._executing():
                running.end(cut=0)
        except SMPError as another:
            error.add_note(f"and then: {another}")

    def _execute_last(self) -> None:
        """Executes what is left when all has been recorded."""
        if self._running is not None:
            last = self._progress[max(self._progress)].recording
            if not self._running.accepts(last):
                self._cut()
        if self._running is not None:
            self._end_ahead()
        else:
            self._execute(last_batch=True)

    @contextlib.contextmanager
    def _executing(self, *, seeds: bool = True) -> Iterator[None]:
        """Around what runs. For ``seeds`` see :meth:`RandomStreams.executing`."""
        with without_users_modes(self._modes_around), self.streams.executing(seeds=seeds):
            yield

    # Planning and executing ---------------------------------------------------------------------------------

    def _before_running(self, *, all_recorded: bool = True) -> None:
        assert self._recorder is not None
        self._recorder.modules.before_running(all_recorded=all_recorded)
        self._recorder.ordinary.before_running(all_recorded=all_recorded)
        self._recorder.backward_state.before_running()

    def _execute(self, *, last_batch: bool) -> None:
        if self._has_failed is not None:
            self.all_know = True
            raise SMPError(
                "the step function went on after a call had failed whose result it had asked for: what it "
                f"caught ends the step all the same, since the call belongs to other ranks too: "
                f"{self._has_failed}"
            ) from self._has_failed
        batch = self.planner.plan(self._progress, last_batch=last_batch)
        recordings = {m: progress.recording for m, progress in self._progress.items()}
        if last_batch and self.on_planned is not None:
            self.on_planned(batch, recordings)
        self._before_running()
        observer = self.observer()
        if observer is not None:
            observer.recorded(recordings)
        for executor in self.executors.values():
            executor.observe(observer)
        while not self._compare(recordings, ALL if last_batch else LOOKS):
            pass  # some could have run ahead; they go on recording now, and come again
        for executor in self.executors.values():
            executor.adopt()
        for work in batch.works:
            for stage, executor in self.executors.items():
                executor.states[work.microbatch_index].update(batch.part(work.graph, stage), stage)
        for stage, books in self.books.items():
            books.plan(batch.works, recordings, batch.schedule[stage], stage, last_batch=last_batch)
        if self._stage_peers is not None:
            self._stage_peers.begin_list()
        is_seeded = self._recorder.backward_state.runs_python or any(
            command.is_seeded() for recording in recordings.values() for command in recording.commands
        )
        with self._executing(seeds=is_seeded):
            self.peers.drive(
                {stage: executor.run(batch.schedule[stage]) for stage, executor in self.executors.items()}
            )
        self._conclude(batch)
        if last_batch and not self._recorder.ordinary.changes_earlier:
            self.planner.note_alike(batch, self._progress)

    def _conclude(self, batch: Batch) -> None:
        """The list of the batch has run here: learns how it went elsewhere, and notes what is done.

        Raises:
            SMPError: an action has failed on some rank.
        """
        assert self._recorder is not None
        self._recorder.backward_state.after_running()
        placement = self._recorder.placement
        key, trained = self._trained.of(batch, self._progress, placement)
        self._agree_on_outcome(batch, key, trained)
        self.planner.note(batch, self._progress)
        placement.note_gradients(trained - self._trained.lacking(key))
        self.last_batch = batch
        self._is_awaited = True

    def _agree_on_outcome(self, batch: Batch, key: Any, trained: frozenset[str]) -> None:
        """Raises the same error on all ranks if an action has failed on any.

        Else all learn which of the parameters that could have a gradient now have none: where a module has
        not used them, only their owner knows.
        """
        own = [executor for executor in self.executors.values() if executor.failure is not None]
        mine = min((e.failure for e in own if e.failure is not None), key=lambda f: f.time_ns, default=None)
        if mine is not None:
            mine.rank = self.peers.rank
        assert self._recorder is not None
        news = self._trained.news(key, trained, self._recorder.placement)
        keeps = [(m, placed.smp_value) for m, placed in self._recorder.survivors]
        outcomes, self._kept_by_all = self.peers.outcomes(
            mine if mine is not None else news, "the end of a step", keeps
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            self.all_know = True
            if self._stage_peers is not None:
                self._stage_peers.start_anew()
            self._touched_gradients |= any(work.pending_backwards() for work in batch.works)
            dropped = self._has_touched_gradients() or self.drops_with_replicas
            self._has_failed = step_failure(failures, touched_gradients=dropped)
            raise self._has_failed from next((e.error for e in own if e.failure is mine), None)
        self._trained.learn(key, outcomes)

    def _undo(self) -> bool:
        """The step has failed: nothing of it stays. Returns whether gradients are dropped."""
        recorder = self._recorder
        assert recorder is not None
        recorder.buffers.restore()
        dropped = self._has_touched_gradients()
        if dropped:
            self.drop_gradients_of(recorder.placement)
        return dropped

    def _has_touched_gradients(self) -> bool:
        """Whether a backward of the step has run on any rank, or may have."""
        return self._touched_gradients or any(p.backward_done for p in self._progress.values())

    @staticmethod
    def drop_gradients_of(placement: Placement) -> None:
        """What a failed step has added to gradients cannot be taken out of them again."""
        for parameter in placement.root.parameters():
            parameter.grad = None

    @property
    def has_backward(self) -> bool:
        """Whether one has been recorded in this step."""
        return any(progress.recording.backwards for progress in self._progress.values())

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._recorder is not None

    def _compare(self, recordings: dict[int, Recording], where: int, *, ahead: bool = False) -> bool:
        """All mp ranks must have recorded the same; see :mod:`.comparing`."""
        assert self._recorder is not None
        is_last = where == ALL
        self.all_know = True  # who is not alike raises, and so do the others
        compared = checks(
            recordings,
            where,
            self._recorder.ordinary.contents,
            self._inputs if is_last else (0, list),
            self._start_state if is_last and self.drew() else 0,
            (self._between.digest(in_stages=True), partial(self._between.lines, in_stages=True)),
        )
        try:
            are_alike = self.peers.compare(compared, ahead=ahead)
        except PeerFailed:
            self._has_moved_on = True  # with the rank that has failed
            raise
        self.all_know = False
        self._is_awaited = ahead or not are_alike
        return are_alike

    def drew(self) -> bool:
        """Whether the user's function drew random numbers in this step."""
        return self.streams.state_digest() != self._start_state

    def spans(self) -> dict[int, list[Any]]:
        """For each stage here, when its forwards and backwards ran in the last step."""
        return {stage: executor.spans.all() for stage, executor in self.executors.items()}
