"""Writes commands: what a call gets and gives, where it runs, and with which seed.

The recorder hears of a call; here it becomes a :class:`..commands.recording.Command` of the present
recording, at once where its result can be told without running it (:mod:`..describe.descriptions`), and
otherwise by running everything up to it on its stage. Where a call lands:

- a module that is called whole (:mod:`.module_calls`): on its stage;
- a torch function in an opened module's code: on that module's stage;
- any other torch function, a stateless module: on the stage of its largest input, so that residual sums,
  views and the loss go where the data is; among equals on that of the latest value, whose consumers follow
  there;
- a change in place of a value that views share memory with: where that memory is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from ...errors import SMPError
from ..backward.checkpoints import is_inside_checkpoint, refuse_effect
from ..code.source_line import CHECKPOINT_BETWEEN_MODULES, HOOKS_WITHOUT_EFFECT, warn_once_at_user_line
from ..commands.apply_function import ApplyFunction
from ..commands.binding import Binder, family_of, sharing_memory
from ..commands.recording import Command, Recording
from ..describe.checkpointed_calls import CheckpointedRun
from ..describe.descriptions import Description, NeedsData, NotDescribed, Opened, content_token
from ..describe.signature import structure_token, token
from ..parameters.placement import STATELESS
from ..state.ambient import Ambient
from ..state.draws import Draw
from ..values.calls import Arguments, NewTensor, ResultMeta
from ..values.placed import PlacedTensor
from ..values.torch_functions import function_name
from .module_calls import DRAWS, UNDER_A_MODE

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["CommandWriter"]

Function = Callable[..., Any]

_GRADIENT = frozenset(("grad", "_grad"))


class CommandWriter:
    """Writes into the present recording of a recorder.

    Attributes:
        made: the placed values of the present microbatch that may still be there.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.made: list[weakref.ref[PlacedTensor]] = []
        self._binder: Binder | None = None
        self._drawn: Counter[str] = Counter()

    def begin_microbatch(self, recording: Recording) -> None:
        self.made.clear()
        self._drawn.clear()
        self._binder = Binder(recording, self.recorder, self.recorder.serial, self.made)

    def end_microbatch(self) -> None:
        """Lets go of the recording; what was made of it may outlive it."""
        self.made.clear()
        self._binder = None

    def value_of(self, placed: PlacedTensor) -> int:
        """The value that a placed tensor stands for now.

        Each call that a parameter is given to outside its module has a value of its own of it: the module's
        own uses add to the gradient too, between the others, and so may several backwards, each a sum of its
        own.
        """
        recording = self.recorder.recording
        assert recording is not None
        full = placed.smp_parameter
        if full is None:
            return placed.smp_value
        value = recording.new_value(placed.smp_stage, placed.smp_meta, is_parameter=True)
        self.source(full, placed.smp_stage, value, parameter=full)
        return value

    def source(self, label: str, stage: int, value: int, **what: Any) -> None:
        """A command that has no arguments and makes one value."""
        recording = self.recorder.recording
        assert recording is not None
        parameter = what.get("parameter")
        command = Command(
            index=len(recording.commands),
            stage_index=stage,
            label=label,
            arguments=Arguments([], None),
            sources=[],
            ambient=Ambient.current(),
            epoch=recording.epoch,
            outputs=(value,),
            touches=self.recorder.buffers.touched_parameter(parameter) if parameter is not None else (),
            **what,
        )
        mark = token(label)
        recording.add(command, ((),), (mark, mark))

    def record_module(
        self, name: str, module: nn.Module, arguments: Arguments, home: int, *, bare: bool
    ) -> tuple[str | None, Any]:
        """Records a closed call; (None, its result), or (why the module has to be opened, None)."""
        recorder = self.recorder
        recorder.ordinary.with_inputs(arguments, home if home >= 0 else None)
        ambient = recorder.ambient()
        if ambient.num_modes != recorder.num_modes:
            return UNDER_A_MODE, None
        described = recorder.descriptions.describe(name, module, arguments, ambient)
        if type(described) is Opened:
            return described.reason, None
        target = recorder.ordinary.first_changed(described, arguments)
        if target is not None:
            recorder.ordinary.add_twin(target, home if home >= 0 else self.stage(arguments, None))
            args, kwargs = arguments.build(arguments.tensors)
            return self.record_module(name, module, recorder.arguments(args, kwargs), home, bare=bare)
        if home < 0 and isinstance(described, Description) and described.meta.draws:
            return DRAWS, None
        if isinstance(described, Description) and described.meta.buffers:
            recorder.buffers.before_first_change(module, described.meta)
        command = self._command(name, arguments, described, ambient, home, may_compare=True)
        command.module, command.bare = module, bare
        command.unit = recorder.placement.unit(module)
        if recorder.num_microbatches > 1 and ambient.grad:
            command.looks_at_gradients = recorder.descriptions.mentions(module, _GRADIENT)
        if not isinstance(described, Description) or described.meta.draws:
            # Neither the partition nor what else is recorded changes what is drawn.
            if type(module) is CheckpointedRun:
                parts = [recorder.placement.name(part) for part in module.children()]
                command.seeds = tuple([self.seed_key(part) for part in parts])
            else:
                command.seed_key = self.seed_key(name)
        if not isinstance(described, Description):
            assert type(described) is NotDescribed
            return self._run_for_real(command, described)
        for buffer in described.meta.buffers:
            refuse_effect(name, f"changes the buffer {buffer}")
        assert recorder.recording is not None
        if described.meta.saved_state or described.meta.unguarded:
            command.must_stay = recorder.saved_state.note(module, described.meta, recorder.recording)
        command.touches = recorder.buffers.touched(module, described.meta)
        if described.meta.returned:
            recorder.buffers.note_returned(module, described.meta.returned)
        result = self._append(command, described)
        recorder.buffers.seen.recorded()
        recorder.modules.note(command, recorder.descriptions.read)
        return None, result

    def seed_key(self, name: str) -> tuple[str, int]:
        """Of a module that draws, for its next call."""
        key = (name, self._drawn[name])
        self._drawn[name] += 1
        return key

    def function(self, func: Function, arguments: Arguments) -> Any:
        """Records a torch function."""
        self.recorder.ordinary.with_inputs(arguments, self.recorder.modules.home)
        ambient = self.recorder.ambient()
        name = function_name(func)
        described = self.recorder.descriptions.describe(name, func, arguments, ambient)
        if type(described) is NeedsData:
            numbers = self.recorder.forced.numbers(arguments)
            if numbers is not None:
                if any(type(tensor) is PlacedTensor for tensor in numbers.tensors):
                    return self.function(func, numbers)
                args, kwargs = numbers.build(numbers.tensors)
                return self.recorder.ordinary_function(func, args, kwargs)
            described = NotDescribed(None)
        target = self.recorder.ordinary.first_changed(described, arguments)
        if target is not None:
            self.recorder.ordinary.add_twin(target, self.stage(arguments, None))
            return self.function(func, self.recorder.arguments(*arguments.build(arguments.tensors)))
        assert not isinstance(described, NeedsData | Opened)
        if isinstance(described, Description) and described.meta.kept_bytes and is_inside_checkpoint():
            warn_once_at_user_line(CHECKPOINT_BETWEEN_MODULES)
        may_compare = type(func) is ApplyFunction or func is F.multi_head_attention_forward
        command = self._command(name, arguments, described, ambient, STATELESS, may_compare=may_compare)
        command.function = func
        if not isinstance(described, Description):
            self.recorder.draws.look()
            command.draw = Draw(func, arguments)
            command.draw.note()
            return self._run_for_real(command, described)[1]
        if described.meta.draws:
            if (tape := self.recorder.tape) is not None:
                tape.draws(arguments)
            command.draw, moved = self.recorder.draws.take(func, arguments, (func, described.content))
            if not moved:
                return self._run_for_real(command, NotDescribed(None))[1]
        if described.meta.changed:
            self._note_changed_parameters(command, described, arguments)
        command.touches = self.recorder.buffers.touched_by(arguments)
        if type(func) is ApplyFunction:
            self.recorder.modules.note_function(command, func.cls)
        return self._append(command, described)

    def on_made(self, func: Function, arguments: Arguments, described: Description) -> None:
        """Records a function that gets its argument as it was made, on its stage."""
        (placed,) = arguments.tensors
        assert type(placed) is PlacedTensor
        ambient = self.recorder.ambient()
        command = self._command(function_name(func), arguments, described, ambient, placed.smp_stage)
        command.function, command.on_made = func, True
        self._append(command, described)

    def touch_earlier(self, part: nn.Module, number: int) -> None:
        """Calls of this microbatch that use the module, and functions that read its own parameters, come
        before what is about to change it."""
        recording = self.recorder.recording
        assert recording is not None
        holders = self.recorder.placement.holders
        own = [c for c in recording.commands if c.parameter is not None and part in holders(c.parameter)]
        views = {value for command in own for value in command.outputs}
        for command in recording.commands:
            if command.module is not None:
                uses = any(inner is part for inner in command.module.modules())
            elif uses := not views.isdisjoint(command.sources):
                views.update(_views(command))
            if uses:
                command.touches = (*command.touches, number)
                recording.structure_digest = hash((recording.structure_digest, command.index, number))

    def _note_changed_parameters(self, command: Command, described: Any, arguments: Arguments) -> None:
        """A torch function changes parameters in place: calls of modules that use them keep their order.

        Other microbatches' backwards still need a parameter that is trained as it was for the first, and
        those of earlier calls what they have kept: a copy where that is on another stage.
        """
        recording = self.recorder.recording
        assert recording is not None
        for changed in described.meta.changed:
            target = arguments.tensors[changed.argument]
            for member in sharing_memory(target) if type(target) is PlacedTensor else ():
                full = member.smp_parameter
                if full is None:
                    continue
                is_trained = member.smp_meta.requires_grad and recording.microbatch_index > 0
                is_unheard = family_of(member) != family_of(
                    target
                )  # by way of .data: autograd does not notice
                root = self.recorder.placement.root
                if is_trained or (is_unheard and self.recorder.saved_state.is_read_later(root, full)):
                    command.must_stay = (full,)  # to clip it again is no change
                self.recorder.buffers.note_parameter(full)

    def _command(
        self,
        label: str,
        arguments: Arguments,
        described: Any,
        ambient: Ambient,
        home: int,
        *,
        may_compare: bool = False,
    ) -> Command:
        """``may_compare``: its code may ask whether two arguments are the same tensor (``k is v``)."""
        recording = self.recorder.recording
        assert recording is not None
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if has_hooks and not is_inside_checkpoint():
            warn_once_at_user_line(HOOKS_WITHOUT_EFFECT)
        once: dict[str, int] = {}  # so a parameter that is given twice has to be one there too
        sources = []
        for tensor in reversed(arguments.tensors):  # autograd adds the gradient of the first one first
            if type(tensor) is not PlacedTensor:
                sources.append(-1)
            elif (full := tensor.smp_parameter) is None:
                sources.append(tensor.smp_value)
            elif full in once:
                sources.append(once[full])
            else:
                sources.append(self.value_of(tensor))
                if may_compare:
                    once[full] = sources[-1]
        sources.reverse()
        command = Command(
            index=len(recording.commands),
            stage_index=home if home >= 0 else self.stage(arguments, described),
            label=label,
            arguments=arguments,
            sources=sources,
            ambient=ambient,
            epoch=recording.epoch,
        )
        return command

    def _append(self, command: Command, described: Description) -> Any:
        """Adds a described command; returns its result."""
        assert self.recorder.recording is not None
        recording, repeated = self.recorder.recording, self.recorder.repeated
        written = [changed.argument for changed in described.meta.changed]
        given = list(command.arguments.tensors)
        for i in described.meta.saved_arguments if torch.is_grad_enabled() else ():
            if type(kept := given[i]) is PlacedTensor:
                names = [member.smp_parameter for member in sharing_memory(kept)]
                self.recorder.saved_state.note_given([name for name in names if name is not None])
        self.recorder.ordinary.capture(
            command.arguments, command.sources, described.meta.saved_arguments, written
        )
        leaves, before = repeated.leaves_of(command), (recording.digest, recording.structure_digest)
        returned, links = self.bind(command, described.meta, given)
        recording.add(command, links, (described.content, described.structure))
        repeated.learn(command, described, leaves, before)
        return returned

    @property
    def binder(self) -> Binder:
        """Of the present microbatch."""
        assert self._binder is not None
        return self._binder

    def bind(self, command: Command, meta: ResultMeta, given: Sequence[Any]) -> tuple[Any, Any]:
        """Completes a command; returns its result and, for each output, the values it depends on.

        Args: see :meth:`Binder.bind`.
        """
        assert self._binder is not None
        returned, links = self._binder.bind(command, meta, given)
        command.arguments.forget(command.sources)
        return returned, links

    def stage(self, arguments: Arguments, described: Any) -> int:
        """Where a call without a home of its own goes."""
        placed = [tensor for tensor in arguments.tensors if type(tensor) is PlacedTensor]
        if isinstance(described, Description):
            for changed in described.meta.changed:
                target = arguments.tensors[changed.argument]
                if type(target) is PlacedTensor and (
                    target.smp_parameter is not None or len(sharing_memory(target)) > 1
                ):
                    return target.smp_stage
        if self.recorder.modules.home is not None:
            return self.recorder.modules.home
        if not placed:
            raise SMPError("a call without placed arguments cannot be placed")
        return max(placed, key=_weight).smp_stage

    # What only running shows --------------------------------------------------------------------------------

    def _run_for_real(self, command: Command, unknown: NotDescribed) -> tuple[str | None, Any]:
        """Records a call that only its execution can describe, and executes up to it."""
        recording = self.recorder.recording
        assert recording is not None
        recording.epoch += 1
        command.epoch = recording.epoch
        mark = content_token(command.label, command.arguments)
        recording.add(command, (), (mark, mark))
        found = self.recorder.host.run_for_real(recording, command)
        self.recorder.ordinary.forget_captured()
        if isinstance(found, str):
            recording.epoch += 1
            return found, None
        if found.states:
            assert command.draw is not None
            self.recorder.draws.take_over(found.states, command.draw)
        for buffer in found.buffers:
            refuse_effect(command.label, f"changes the buffer {buffer}")
        if command.module is not None:
            command.touches = self.recorder.buffers.touched(command.module, found)
        self.recorder.descriptions.learn(unknown, command.label, command.arguments, found)
        returned, links = self.bind(command, found, command.arguments.tensors)
        recording.links[-1] = links
        recording.structure_digest = hash((recording.structure_digest, structure_token(found)))
        recording.epoch += 1
        return None, returned


def _views(command: Command) -> list[int]:
    """The values that share memory with an argument, and the new versions of those that change."""
    made = [leaf for leaf in command.meta.leaves if type(leaf) is NewTensor] if command.meta else []
    views = [value for value, leaf in zip(command.outputs, made) if leaf.aliases is not None]
    return [*views, *(new for _, new in command.changes)]


def _weight(placed: PlacedTensor) -> tuple[int, int]:
    """Size, then age: parameters are the oldest."""
    return placed.smp_meta.num_bytes, getattr(placed, "smp_value", -1)
