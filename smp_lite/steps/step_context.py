"""One call of a step function: recording, then execution.

The model may still have to be partitioned when the first step begins; then recording starts at its first
call, in the middle of the user's function, so that nothing of the function runs twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..plan.collecting import without_gc
from ..record.code.reads import places_reached
from ..record.commands.recording import Recording
from ..record.commands.replay import Tape, TensorsBefore, given_objects, refuse, step_key
from ..record.describe.effects import Effects, NeedsOpening
from ..record.interception import listening
from ..record.state.ambient import Ambient
from ..record.state.between import ReadBetween
from ..record.state.python_state import PythonState
from ..record.state.random_state import python_state
from ..record.step.recorder import Recorder
from ..record.values.microbatch import merge_outputs
from ..record.values.placed import PlacedTensor
from ..record.values.structure import flatten, rebuild
from ..runtime.model_runtime import ModelRuntime
from ..session import Session
from .input_digests import describe_inputs, input_digest, input_tensors
from .static_steps import Slot, StaticStep, StaticSteps

FIRST_CHECKED_STEPS = 3
CHECK_EVERY_STEPS = 100


class StepContext:
    """The step that is running now.

    Args:
        session: the open one.
        inputs: (args, kwargs) of each microbatch.
        step_index: how many there have been before.
        is_handed_over: all ranks have one rank's batch: it need not be compared.
        trains: whether the function is going to call model.backward, as far as is known.
    """

    runs_plainly = False

    def __init__(
        self,
        session: Session,
        inputs: list[Any],
        step_index: int,
        *,
        is_handed_over: bool,
        trains: bool,
    ) -> None:
        self.session = session
        self.inputs = inputs
        self.step_index = step_index
        self._is_handed_over = is_handed_over
        self._trains = trains
        self.runtime: ModelRuntime | None = None
        self.microbatch_index = 0
        self.has_backward = False
        self._function: Callable[..., Any] | None = None
        self._stack = contextlib.ExitStack()

    @property
    def has_recorded_backward(self) -> bool:
        """Whether the step function has called model.backward by now."""
        recording = self.runtime.recorder.recording if self.runtime is not None else None
        return self.has_backward or (recording is not None and bool(recording.backwards))

    @property
    def recorder(self) -> Recorder:
        assert self.runtime is not None
        return self.runtime.recorder

    def start_recording(self, runtime: ModelRuntime, *, has_begun: bool = False) -> None:
        """From here on, module calls and torch functions are recorded; ``has_begun``: the step has begun."""
        self.runtime = runtime
        runtime.recorder.backward_state.effects.step_function = self._function
        checked = self._checked_inputs()
        if not has_begun:
            runtime.begin_step(len(self.inputs), checked, trains=self._trains)
        tensors = (tensor for _, _, tensor in input_tensors(self.inputs))
        compared = not runtime.peers.are_alone
        runtime.recorder.ordinary.begin_step(tensors, strict=checked[0] != 0, compared=compared)
        self._stack.enter_context(listening(runtime.recorder))
        self._begin_microbatch()

    def _checked_inputs(self) -> tuple[int, Callable[[], list[str]]]:
        """The batch's digest, in the first steps and then now and then, and its description."""
        check = self.step_index < FIRST_CHECKED_STEPS or self.step_index % CHECK_EVERY_STEPS == 0
        if check and self._is_handed_over:
            return 1, list
        return input_digest(self.inputs) if check else 0, functools.partial(describe_inputs, self.inputs)

    def _begin_microbatch(self) -> None:
        assert self.runtime is not None
        recording = self.runtime.recorder.begin_microbatch(self.microbatch_index)
        self.runtime.runner.add(recording)

    def run(self, function: Callable[..., Any], detach_outputs: bool, static: StaticSteps) -> Any:
        """Runs the function for every microbatch and executes what it did."""
        self._function = function
        model = self.session.model
        if model is None or model.runtime is None:
            # Not listened to from its beginning, so never kept for replay.
            return self._record(function, detach_outputs, None)
        if not self.session.cfg.static_mode:
            return self._record(function, detach_outputs, None)
        of_inputs, leaves = step_key(self.inputs)
        key = (model.training, Ambient.current(), *of_inputs)
        found = static.get(key)
        if found is not None and found.is_never_replayed:
            return self._record(function, detach_outputs, None)
        if found is None or found.have_surroundings_changed():
            static.pop(key, None)
            kept = StaticStep()
            result = self._record(function, detach_outputs, kept)
            given = [value for value in given_objects(self.inputs) if value is not model]
            kept.settle(model, function, given)
            static[key] = kept
            return result
        self.runtime = model.runtime
        self.runtime.begin_step(len(self.inputs), self._checked_inputs(), trains=found.has_backward)
        slots = found.made_again(leaves, self.recorder.buffers.kept.before_change)
        if slots is None:
            return self._record(function, detach_outputs, None, has_begun=True)
        for recording in found.recordings:
            recording.draw_again()
            self.runtime.runner.add(recording)
        self.has_backward = found.has_backward
        return self._finish(found.outputs, detach_outputs, slots)

    def _record(
        self,
        function: Callable[..., Any],
        detach_outputs: bool,
        kept: StaticStep | None,
        *,
        has_begun: bool = False,
    ) -> Any:
        outputs: list[tuple[list[Any], Any]] = []
        effects = None if kept is None else self._effects_of(function)
        drawn = None if kept is None else python_state()
        with self._stack:
            if effects is not None:
                self._stack.enter_context(effects.watched())
            model = self.session.model
            if model is not None and model.runtime is not None:
                self.start_recording(model.runtime, has_begun=has_begun)
            before = None if kept is None else TensorsBefore()
            for m, (args, kwargs) in enumerate(self.inputs):
                self.microbatch_index = m
                # Whatever of a microbatch is held at its end is kept for later. Values in circles are held
                # until Python collects them, which it does when it likes, on each rank at another time.
                with without_gc():
                    if self.runtime is not None and m > 0:
                        self._begin_microbatch()
                    if before is not None:
                        self.recorder.tape = Tape(_leaves((args, kwargs)), before)
                    try:
                        returned = function(*args, **kwargs)
                    except NeedsOpening as reason:  # from what watches the step for replay
                        raise refuse(f"runs code that {reason}") from None
                    outputs.append(self._end_microbatch(returned, kept))
                    del returned
                if self.runtime is not None and kept is None and m + 1 < len(self.inputs):
                    recording = self.recorder.recordings[self.recorder.serial]
                    if self.session.takes_rest_alike and self._take_rest(recording):
                        break
                    self.runtime.runner.recorded(recording)
            if kept is not None:
                self.recorder.tape = None
                assert self.runtime is not None
                if self.recorder.drew_by_itself() or python_state() != drawn:
                    raise refuse("draws random numbers itself")
                kept.outputs, kept.has_backward = outputs, self.has_backward
        if effects is not None and (found := effects.found()) is not None:
            raise refuse(f"does more than compute: it {found}")
        if kept is not None and effects is not None:
            kept.names = effects.names
        if self.runtime is None:
            return merge_outputs([rebuild(spec, iter(leaves)) for leaves, spec in outputs])
        return self._finish(outputs, detach_outputs, [{} for _ in outputs])

    def _take_rest(self, last: Recording) -> bool:
        """In a step that is only planned: if the last microbatch repeats the first, so do those to come."""
        assert self.runtime is not None
        first = self.recorder.recordings[self.recorder.serial - last.microbatch_index]
        is_alike = (last.digest, last.plan_key()) == (first.digest, first.plan_key())
        if not last.microbatch_index or not is_alike:
            return False
        for m in range(last.microbatch_index + 1, len(self.inputs)):
            self.runtime.runner.add(last.one_more(m, first))
        return True

    def _effects_of(self, function: Callable[..., Any]) -> Effects:
        """What the model's own code leaves behind, which a replay would not. The step function is known not
        to
        run again."""
        around = PythonState()
        around.add(function, getattr(function, "__name__", "the step function"))
        read = ReadBetween()
        read.look(places_reached([function]))  # globals too
        opaque = around.opaque[0] if around.opaque else read.opaque()
        if opaque is not None:
            raise refuse(f"may take from {opaque}")
        try:
            return Effects(self.session.model.module, (), {}, (function,))
        except NeedsOpening as reason:
            raise refuse(f"runs code that {reason}") from None

    def _end_microbatch(self, result: Any, kept: StaticStep | None) -> tuple[list[Any], Any]:
        """Flattens a result; its placed values are wanted after the step."""
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        leaf = placed = None
        if self.runtime is None:
            return leaves, spec
        recorder = self.recorder
        recording = recorder.recording
        assert recording is not None
        for i, leaf in enumerate(leaves):
            placed = recorder.ordinary.placed_for(leaf)
            if placed is not None and _is_of_earlier(placed, recorder):
                leaves[i] = self._earlier(placed)
            elif placed is not None:
                value = recorder.writer.value_of(placed)
                recording.needed.add(value)
                leaves[i] = _Output(self.microbatch_index, value)
            elif recorder.tape is not None and (slot := recorder.tape.slot(leaf)) is not None:
                leaves[i] = Slot(slot, leaf)  # which this step returns
        self.has_backward |= bool(recording.backwards)
        del result, leaf, placed  # what only the result held need not be written back
        recorder.end_microbatch()
        if kept is not None:
            assert recorder.tape is not None
            recorder.tape.bind(recording, leaves)
            kept.recordings.append(recording)
            kept.tapes.append(recorder.tape)
        return leaves, spec

    def _earlier(self, placed: PlacedTensor) -> Any:
        """In a result: a value that an earlier microbatch, or an earlier step, has made."""
        recorder = self.recorder
        recording = recorder.recordings.get(placed.smp_microbatch)
        if recorder.tape is not None:
            raise refuse("returns a value of an earlier microbatch")
        if recording is None:
            return recorder.forced.data_of(placed, "return")
        # It was held when its microbatch ended, so it is kept to the end of the step.
        return _Output(recording.microbatch_index, placed.smp_value)

    def _finish(
        self,
        outputs: list[tuple[list[Any], Any]],
        detach_outputs: bool,
        slots: list[dict[int, Any]],
    ) -> Any:
        """Executes; ``slots`` are the replayed tensors of each microbatch."""
        assert self.runtime is not None
        wanted = dict.fromkeys(
            (leaf.microbatch_index, leaf.value)
            for leaves, _ in outputs
            for leaf in leaves
            if type(leaf) is _Output
        )
        found = self.runtime.finish(
            list(wanted), has_backward=self.has_backward, keep_graph=not detach_outputs
        )
        by_value = dict(zip(wanted, found, strict=True))

        def filled(leaf: Any, values: dict[int, Any]) -> Any:
            if type(leaf) is _Output:
                return by_value[leaf.microbatch_index, leaf.value]
            if type(leaf) is Slot:
                leaf = values.get(leaf.slot, leaf.recorded)
            return leaf.detach() if detach_outputs and isinstance(leaf, torch.Tensor) else leaf

        return merge_outputs(
            [
                rebuild(spec, iter([filled(leaf, values) for leaf in leaves]))
                for (leaves, spec), values in zip(outputs, slots, strict=True)
            ]
        )

    def abandon(self, error: BaseException) -> None:
        """The step has failed."""
        if self.runtime is not None:
            self.runtime.recorder.tape = None
            self.runtime.abandon(error)
        elif self.session.model is not None:
            self.session.model.failed_before_partition(error)


def _is_of_earlier(placed: PlacedTensor, recorder: Recorder) -> bool:
    return placed.smp_parameter is None and placed.smp_microbatch != recorder.serial


class _Output:
    """A placed value in a step's result, to be filled in after execution."""

    __slots__ = ("microbatch_index", "value")

    def __init__(self, microbatch_index: int, value: int) -> None:
        self.microbatch_index, self.value = microbatch_index, value


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(value, leaves)
    return leaves
