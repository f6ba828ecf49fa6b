"""The recorder: turns what the user's function does into commands.

It hears of every module call and every torch function that touches a placed value, decides on which stage
it belongs, finds out what it would return (:mod:`.descriptions`), appends a command and hands back placed
values. Where a call lands:

- a module that is called whole (:mod:`.module_calls`): on its stage;
- a torch function in an opened module's code: on that module's stage;
- any other torch function, a stateless module: on the stage of its largest input, so that residual sums,
views
  and the loss go where the data is; among equals on that of the latest value, whose consumers follow there;
- a change in place of a value that views share memory with: where that memory is.

What Python needs to know now (:mod:`.forced`) is asked of the *host*, which executes what has been recorded
so far on all ranks and shares the answer. That is right for any control flow and costs overlap, so it warns
once a source line.

A replicated tensor changed in place with a placed operand (``total += loss``) gets a placed twin
(:mod:`.twins`), which stands in for it until the microbatch ends. An ordinary tensor that requires a gradient
becomes a placed *input*, whose gradient every rank gets at the end of the step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from .ambient import FUNCTORCH, Ambient, refuse_transformations
from .apply_function import ApplyFunction
from .away import AwayParameter, is_away, needed
from .binding import Binder, sharing_memory
from .calls import Arguments, ResultMeta
from .descriptions import Description, Descriptions, NeedsData, NotDescribed, Opened, content_token
from .draws import Draw, Draws
from .forced import Forced, Host
from .module_calls import DRAWS, ModuleCalls
from .placed import PlacedTensor, storage_of
from .placement import STATELESS, Placement
from .recording import Backward, Command, Recording
from .replay import Tape, refuse
from .signature import function_name, structure_token, tensor_meta, token
from .source_line import CHECKPOINT_WITHOUT_EFFECT, warn_once_at_user_line
from .torch_functions import DETACHES, FROM_NUMBERS, LOOKS_AT_DATA, REFUSED, changes_first
from .twins import Twins

__all__ = ["Recorder"]

Function = Callable[..., Any]
_PARAMETERS = (nn.Parameter, AwayParameter)


class Recorder:
    """Records one step at a time; keeps its caches from step to step."""

    def __init__(self, placement: Placement, host: Host) -> None:
        self.placement = placement
        self.host = host
        self.descriptions = Descriptions()
        self.suspended = False
        self.serial = -1  # counts microbatches over all steps
        self.recording: Recording | None = None
        self.tape: Tape | None = None  # set while a step is recorded for replay
        self.num_microbatches = 1
        self.num_modes = 0  # torch's own modes and ours, without the user's
        self.twins = Twins()
        self.draws = Draws()
        self.modules = ModuleCalls(self)
        self.survivors: list[tuple[int, PlacedTensor]] = []
        self._forced = Forced(self)
        self._captured: dict[int, list[tuple[Arguments, int]]] = {}
        self._recordings: dict[int, Recording] = {}
        self._inputs: dict[int, tuple[torch.Tensor, PlacedTensor]] = {}
        self._drawn: Counter[str] = Counter()
        self._made: list[weakref.ref[PlacedTensor]] = []

    @property
    def not_listening(self) -> bool:
        """Whether what happens now is the library's own doing, and none of the user's code."""
        return self.suspended or self.descriptions.inferring or self.recording is None

    # The life of a step ---------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int, *, strict: bool) -> None:
        """A step begins; a ``strict`` one looks for changes of Python state that were not heard."""
        self.num_microbatches = num_microbatches
        if self.placement.refresh(self):
            self.descriptions.signatures.forget()
        self.descriptions.signatures.new_step()
        self.modules.begin_step(strict=strict)
        self.draws.begin_step()
        self._recordings.clear()
        self.survivors.clear()

    def begin_microbatch(self, microbatch_index: int) -> Recording:
        self.serial += 1
        self.recording = Recording(microbatch_index)
        self._recordings[self.serial] = self.recording
        self.num_modes = Ambient.current().num_modes
        self._drawn.clear()
        self._made.clear()
        return self.recording

    def end_microbatch(self) -> None:
        """Writes placed values back that stand for ordinary tensors, and closes the recording."""
        assert self.recording is not None
        self.write_back()
        for reference in self._made:
            placed = reference()
            if placed is not None and placed.smp_value not in self.recording.needed:
                self.survivors.append((self.recording.microbatch_index, placed))
                self.recording.needed.add(placed.smp_value)
        self._made.clear()
        self._captured.clear()
        self._inputs.clear()
        self.recording.complete = True
        self.recording = None

    def write_back(self) -> None:
        """What stands in for ordinary tensors and for buffers is fetched and written into them."""
        # All of them first: a tensor that has a twin would send the copy there.
        for target, twin in self.twins.take_all():
            if self.tape is not None:
                raise refuse("changes a tensor of its own in place with a result of the model")
            (value,) = self._forced.fetch_quietly([twin])
            with torch.no_grad():
                target.copy_(value)
        rebound, self.modules.rebound = self.modules.rebound, {}
        for (_, name), module in rebound.items():
            table = module._buffers
            placed = getattr(table, "real", table).get(name)
            if type(placed) is PlacedTensor:
                (value,) = self._forced.fetch_quietly([placed])
                table[name] = value

    def drew_by_itself(self) -> bool:
        """Whether this step has drawn random numbers by ordinary calls, which are not recorded."""
        self.draws.look()
        return self.draws.drew_otherwise

    def end_step(self) -> None:
        """Forgets the step; it may have failed in the midst of a microbatch."""
        self.recording = None
        self.twins = Twins()
        self.modules.end_step()
        self._captured.clear()
        self._recordings.clear()
        self._inputs.clear()
        self._made.clear()

    # What interception calls ------------------------------------------------------------------------

    def call_module(
        self, module: nn.Module, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``module(*args, **kwargs)`` during recording; ``call`` is the original ``Module.__call__``."""
        return self.modules.call(module, call, args, kwargs)

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is about to be set, or deleted."""
        self.modules.attribute_set(module, name, value)

    def buffer_read(self, module: nn.Module, name: str, value: Any) -> Any:
        return self.modules.buffer_read(module, name, value)

    def buffer_set(self, module: nn.Module, name: str, value: Any) -> None:
        self.modules.buffer_set(module, name, value)

    def torch_function(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function with at least one placed argument."""
        if self.descriptions.inferring:
            self.descriptions.inference.touched_placed = True
            raise SMPError("a value of the step was used by code that runs on fake tensors")
        if self.recording is None or self.suspended:
            return self._forced.after_the_step(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in LOOKS_AT_DATA:
            return self._forced.call(func, args, kwargs)
        if name == "requires_grad_":
            return self._require_gradient(*args, **kwargs)
        if name in REFUSED:
            raise SMPError(
                f"{function_name(func)}() was called inside an smp.step on a value that lives on one "
                f"stage: {REFUSED[name]}"
            )
        if name == "__deepcopy__":
            func, args, kwargs = torch.clone, args[:1], {}
        elif name == "__set__":
            return self._set_attribute(func, args)
        elif changes_first(name, kwargs):
            target = kwargs.get("out", args[0] if args else None)
            if type(target) is not PlacedTensor and isinstance(target, torch.Tensor):
                return self._change_replicated(func, target, args, kwargs)
        arguments = self.arguments(args, kwargs, detached=name in DETACHES)
        if any(type(tensor) is PlacedTensor for tensor in arguments.tensors):
            return self._function(func, arguments)
        args, kwargs = arguments.build(arguments.tensors)
        return self.ordinary_function(func, args, kwargs)

    def ordinary_function(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function without placed arguments."""
        if self.twins:
            self._before_views_of_twins(Arguments.of(args, kwargs).tensors)
        if self.twins.among(args, kwargs) or any(type(tensor) in _PARAMETERS for tensor in args):
            replaced = self._stand_ins(args, kwargs)
            if replaced is not None:
                return self.torch_function(func, *replaced)
        name = getattr(func, "__name__", "")
        if func in FROM_NUMBERS and any(
            type(tensor) is PlacedTensor for tensor in Arguments.of(args, kwargs).tensors
        ):
            return self._forced.call(func, args, kwargs)
        if name == "__set__" and type(args[1]) is PlacedTensor:
            return self._set_attribute(func, args)
        if changes_first(name, kwargs):
            target = kwargs.get("out", args[0] if args else None)
            self.modules.before_change(target)
            if self._captured:
                self._keep_captured(target)
        if self.tape is not None:
            return self.tape.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _stand_ins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with placed values for tensors that have one; None if none has."""
        arguments = Arguments.of(args, kwargs)
        found = [self.stand_in(tensor) for tensor in arguments.tensors]
        if all(placed is None for placed in found):
            return None
        return arguments.build([p if p is not None else t for p, t in zip(found, arguments.tensors)])

    def stand_in(self, tensor: torch.Tensor) -> PlacedTensor | None:
        """The placed value of an ordinary tensor: its twin, or the parameter that it is."""
        twin = self.twins.get(tensor)
        if twin is None and type(tensor) in _PARAMETERS:
            full = self.placement.alias(tensor)
            return self.placement.placed_parameter(full) if full is not None else None
        return twin

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """``model.backward``: notes from where the backward pass starts."""
        if self.recording is None:
            raise SMPError("model.backward() was called outside a function decorated with @smp.step")
        losses = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
        if grad_tensors is None:
            gradients: list[torch.Tensor | None] = [None] * len(losses)
        else:
            gradients = list(grad_tensors) if isinstance(grad_tensors, tuple | list) else [grad_tensors]
        if len(gradients) != len(losses):
            raise ValueError(f"backward got {len(losses)} tensors and {len(gradients)} grad_tensors")
        values = []
        for i, (loss, gradient) in enumerate(zip(losses, gradients, strict=True)):
            loss = self.placed_for(loss)
            if loss is None or not loss.smp_meta.requires_grad:
                raise SMPError(
                    "model.backward(): the loss does not depend on any parameter of the model that "
                    "requires a gradient (was it detached, or computed under torch.no_grad()?)"
                )
            if gradient is None and loss.smp_meta.num_bytes != loss.smp_meta.dtype.itemsize:
                raise SMPError(
                    f"model.backward(): the loss has shape {loss.smp_meta.shape}, not one element: "
                    "reduce it, or pass grad_tensors"
                )
            if type(gradient) is PlacedTensor:
                (gradients[i],) = self._forced.fetch([gradient], "a gradient given to model.backward()")
            elif self.tape is not None and self.tape.slot(gradient) is not None:
                raise refuse("gives model.backward() a gradient made from its inputs")
            values.append(self.value_of(loss))
        self.recording.backwards.append(Backward(tuple(values), tuple(gradients)))

    def placed_for(self, leaf: Any) -> PlacedTensor | None:
        """The placed tensor that a leaf of a result is, or that stands in for it."""
        if type(leaf) is PlacedTensor:
            return leaf
        return self.twins.get(leaf)

    # Values ---------------------------------------------------------------------------------------------

    def value_of(self, placed: PlacedTensor) -> int:
        """The value that a placed tensor stands for now."""
        recording = self.recording
        assert recording is not None
        full = getattr(placed, "smp_parameter", None)
        if full is None:
            return placed.smp_value
        if full not in recording.parameters:
            value = recording.new_value(placed.smp_stage, placed.smp_meta, is_parameter=True)
            self._source(full, placed.smp_stage, value, parameter=full)
            recording.parameters[full] = value
        return recording.parameters[full]

    def _input(self, tensor: torch.Tensor, stage: int) -> PlacedTensor:
        """A placed value for an ordinary tensor of which the gradient is wanted."""
        found = self._inputs.get(id(tensor))
        if found is not None:
            return found[1]
        recording = self.recording
        assert recording is not None
        if self.tape is not None:
            raise refuse("wants the gradient of a tensor that is no parameter")
        meta = tensor_meta(tensor)
        placed = PlacedTensor(meta)
        placed.smp_recorder, placed.smp_stage, placed.smp_microbatch = self, stage, self.serial
        placed.smp_value = recording.new_value(stage, meta)
        self._source(f"input {len(recording.inputs)}", stage, placed.smp_value, input=tensor)
        recording.inputs.append((placed.smp_value, tensor))
        self._inputs[id(tensor)] = (tensor, placed)
        return placed

    def _source(self, label: str, stage: int, value: int, **what: Any) -> None:
        """A command that has no arguments and makes one value."""
        recording = self.recording
        assert recording is not None
        command = Command(
            index=len(recording.commands),
            stage_index=stage,
            label=label,
            arguments=Arguments([], None),
            sources=[],
            ambient=Ambient.current(),
            epoch=recording.epoch,
            outputs=(value,),
            **what,
        )
        mark = token(label)
        recording.add(command, ((),), (mark, mark))

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, detached: bool = False
    ) -> Arguments:
        """Flattened arguments; what stands for something else is replaced by it.

        Args:
            detached: no gradient will be wanted of values of earlier microbatches.
        """
        arguments = Arguments.of(args, kwargs)
        if self.twins:
            self._before_views_of_twins(arguments.tensors)
        for i, tensor in enumerate(arguments.tensors):
            if type(tensor) is PlacedTensor:
                if tensor.smp_recorder is not self:
                    raise SMPError("a value of another model's step was used: return it from its step first")
                if not hasattr(tensor, "smp_parameter") and tensor.smp_microbatch != self.serial:
                    arguments.replace(i, self._from_earlier_microbatch(tensor, detached=detached))
            elif (found := self.stand_in(tensor)) is not None:
                arguments.replace(i, found)
            elif is_away(tensor):
                raise needed("a step used it", [tensor])
        return arguments

    def _before_views_of_twins(self, tensors: list[torch.Tensor]) -> None:
        """Another view of memory that a twin stands for must see what is in it by now."""
        if not self.twins.overlap(tensors):
            return
        if self.twins.need_gradients():
            raise SMPError(
                "a view of a tensor was used after that tensor had been changed in place with a result of "
                "the model, through which a gradient flows: make the view after the change, or clone() "
                "before it"
            )
        self.write_back()

    def _with_inputs(self, arguments: Arguments, stage: int | None) -> None:
        """Ordinary tensors that require a gradient become placed inputs."""
        if not torch.is_grad_enabled():
            return
        for i, tensor in enumerate(arguments.tensors):
            if type(tensor) is not PlacedTensor and tensor.requires_grad:
                if stage is None:
                    placed = [t.smp_stage for t in arguments.tensors if type(t) is PlacedTensor]
                    stage = placed[0] if placed else 0
                arguments.replace(i, self._input(tensor, stage))

    def _from_earlier_microbatch(self, tensor: PlacedTensor, *, detached: bool) -> torch.Tensor:
        recording = self._recordings.get(tensor.smp_microbatch)
        if recording is None:
            return self._forced.data_of(tensor)
        if tensor.smp_meta.requires_grad and torch.is_grad_enabled() and not detached:
            raise SMPError(
                "a value of one microbatch was used in another with its gradient: microbatches are "
                "independent, so detach() it first"
            )
        if self.tape is not None:
            raise refuse("uses a tensor of one microbatch in another")
        return self._forced.fetch_from(recording, tensor)

    def ambient(self) -> Ambient:
        """The torch state around the line that runs now.

        Raises:
            SMPError: it is inside a transformation of torch.func.
        """
        ambient = Ambient.current()
        if ambient.num_modes >= FUNCTORCH:
            refuse_transformations()
        return ambient

    # Recording one command ------------------------------------------------------------------------------

    def record_module(
        self, name: str, module: nn.Module, arguments: Arguments, home: int, *, bare: bool
    ) -> tuple[str | None, Any]:
        """Records a closed call; (None, its result), or (why the module has to be opened, None)."""
        self._with_inputs(arguments, home if home >= 0 else None)
        ambient = self.ambient()
        described = self.descriptions.describe(name, module, arguments, ambient)
        if type(described) is Opened:
            return described.reason, None
        target = self._first_changed_ordinary(described, arguments)
        if target is not None:
            self._add_twin(target, home if home >= 0 else self._stage(arguments, None))
            args, kwargs = arguments.build(arguments.tensors)
            return self.record_module(name, module, self.arguments(args, kwargs), home, bare=bare)
        if home < 0 and isinstance(described, Description) and described.meta.draws:
            return DRAWS, None
        command = self._command(name, arguments, described, ambient, home)
        command.module, command.bare = module, bare
        if not isinstance(described, Description) or described.meta.draws:
            # Neither the partition nor what else is recorded changes what is drawn.
            command.seed_key = (name, self._drawn[name])
            self._drawn[name] += 1
        if not isinstance(described, Description):
            assert type(described) is NotDescribed
            return self._run_for_real(command, described)
        command.touches = self.modules.touched(module, described.meta.buffers)
        result = self._append(command, described)
        self.modules.note(command)
        return None, result

    def _function(self, func: Function, arguments: Arguments) -> Any:
        """Records a torch function."""
        self._with_inputs(arguments, self.modules.home)
        ambient = self.ambient()
        name = function_name(func)
        described = self.descriptions.describe(name, func, arguments, ambient)
        if type(described) is NeedsData:
            numbers = self._forced.numbers(arguments)
            if numbers is not None:
                if any(type(tensor) is PlacedTensor for tensor in numbers.tensors):
                    return self._function(func, numbers)
                args, kwargs = numbers.build(numbers.tensors)
                return self.ordinary_function(func, args, kwargs)
            described = NotDescribed(None)
        target = self._first_changed_ordinary(described, arguments)
        if target is not None:
            self._add_twin(target, self._stage(arguments, None))
            return self._function(func, self.arguments(*arguments.build(arguments.tensors)))
        assert not isinstance(described, NeedsData | Opened)
        command = self._command(name, arguments, described, ambient, STATELESS)
        command.function = func
        if not isinstance(described, Description):
            self.draws.look()
            command.draw = Draw(func, arguments)
            command.draw.note()
            return self._run_for_real(command, described)[1]
        if described.meta.draws:
            command.draw, moved = self.draws.take(func, arguments, (func, described.content))
            if not moved:
                return self._run_for_real(command, NotDescribed(None))[1]
        if described.meta.changed:
            command.touches = self._changed_parameters(name, described, arguments)
        if type(func) is ApplyFunction:
            self.modules.note_function(command, func.cls)
        return self._append(command, described)

    def touch_earlier(self, part: nn.Module, number: int) -> None:
        """Calls of this microbatch that use the module come before what is about to change it."""
        assert self.recording is not None
        for command in self.recording.commands:
            if command.module is not None and any(inner is part for inner in command.module.modules()):
                command.touches = (*command.touches, number)
                self.recording.structure_digest = hash(
                    (self.recording.structure_digest, command.index, number)
                )

    def _changed_parameters(self, name: str, described: Any, arguments: Arguments) -> tuple[int, ...]:
        """Numbers for the state of modules whose parameters a torch function changes in place.

        Raises:
            SMPError: a parameter that is trained, which other microbatches' backwards still need as it is.
        """
        touched: dict[int, None] = {}
        for changed in described.meta.changed:
            target = arguments.tensors[changed.argument]
            for member in sharing_memory(target) if type(target) is PlacedTensor else ():
                full = getattr(member, "smp_parameter", None)
                if full is None:
                    continue
                if member.smp_meta.requires_grad and self.num_microbatches > 1:
                    raise SMPError(
                        f"{name} changes the parameter {full!r} in place inside an smp.step, while other "
                        "microbatches use it: change it between steps"
                    )
                touched.update(dict.fromkeys(self.modules.note_parameter(full)))
        return tuple(touched)

    @staticmethod
    def _first_changed_ordinary(described: Any, arguments: Arguments) -> torch.Tensor | None:
        """An ordinary tensor that the call changes in place, though every rank holds it."""
        if isinstance(described, Description):
            for changed in described.meta.changed:
                target = arguments.tensors[changed.argument]
                if type(target) is not PlacedTensor:
                    return target
        return None

    def _command(
        self, label: str, arguments: Arguments, described: Any, ambient: Ambient, home: int
    ) -> Command:
        recording = self.recording
        assert recording is not None
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            warn_once_at_user_line(CHECKPOINT_WITHOUT_EFFECT)
        sources = [
            self.value_of(tensor) if type(tensor) is PlacedTensor else -1 for tensor in arguments.tensors
        ]
        command = Command(
            index=len(recording.commands),
            stage_index=home if home >= 0 else self._stage(arguments, described),
            label=label,
            arguments=arguments,
            sources=sources,
            ambient=ambient,
            epoch=recording.epoch,
        )
        return command

    def _append(self, command: Command, described: Description) -> Any:
        """Adds a described command; returns its result."""
        assert self.recording is not None
        self._capture(command.arguments, command.sources)
        returned, links = self._bind(command, described.meta)
        self.recording.add(command, links, (described.content, described.structure))
        return returned

    def _bind(self, command: Command, meta: ResultMeta) -> tuple[Any, Any]:
        assert self.recording is not None
        binder = Binder(self.recording, self, self.serial)
        returned, links = binder.bind(command, meta)
        self._made += binder.made
        command.arguments.forget(command.sources)
        return returned, links

    def _stage(self, arguments: Arguments, described: Any) -> int:
        """Where a call without a home of its own goes."""
        placed = [tensor for tensor in arguments.tensors if type(tensor) is PlacedTensor]
        if isinstance(described, Description):
            for changed in described.meta.changed:
                target = arguments.tensors[changed.argument]
                if type(target) is PlacedTensor and (
                    hasattr(target, "smp_parameter") or len(sharing_memory(target)) > 1
                ):
                    return target.smp_stage
        if self.modules.home is not None:
            return self.modules.home
        if not placed:
            raise SMPError("a call without placed arguments cannot be placed")
        return max(placed, key=_weight).smp_stage

    def _capture(self, arguments: Arguments, sources: list[int]) -> None:
        """Remembers ordinary tensors that a command will read later."""
        for i, source in enumerate(sources):
            if source < 0 and (storage := storage_of(arguments.tensors[i])) is not None:
                self._captured.setdefault(storage, []).append((arguments, i))

    def _keep_captured(self, target: Any) -> None:
        """Before an ordinary tensor changes: commands that captured it keep its present value."""
        storage = storage_of(target) if isinstance(target, torch.Tensor) else None
        for arguments, i in self._captured.pop(storage, ()):  # type: ignore[arg-type]
            with torch.no_grad():
                present = arguments.tensors[i]
                copy = self.tape.call(torch.clone, (present,), {}) if self.tape else present.clone()
                arguments.replace(i, copy)

    # What only running shows --------------------------------------------------------------------------------

    def run_all_recorded(self) -> None:
        """Executes everything that has been recorded so far."""
        assert self.recording is not None
        if self.tape is not None:
            raise refuse("changes the state of modules that have been called")
        self.host.fetch(self.recording, [])
        self.recording.epoch += 1
        self._captured.clear()

    def bring_up_to_date(self, tensor: torch.Tensor, stage: int, name: str) -> torch.Tensor:
        """The present value of a tensor that only one stage keeps up to date, on every rank."""
        self._forced.warn(f"the buffer {name}")
        self.run_all_recorded()
        return self.host.share(tensor, stage)

    def _run_for_real(self, command: Command, unknown: NotDescribed) -> tuple[str | None, Any]:
        """Records a call that only its execution can describe, and executes up to it."""
        recording = self.recording
        assert recording is not None
        recording.epoch += 1
        command.epoch = recording.epoch
        mark = content_token(command.label, command.arguments)
        recording.add(command, (), (mark, mark))
        found = self.host.run_for_real(recording, command)
        self._captured.clear()
        if isinstance(found, str):
            recording.epoch += 1
            return found, None
        if found.states:
            assert command.draw is not None
            self.draws.take_over(found.states, command.draw)
        if command.module is not None:
            command.touches = self.modules.touched(command.module, found.buffers)
        self.descriptions.learn(unknown, command.label, command.arguments, found)
        returned, links = self._bind(command, found)
        recording.links[-1] = links
        recording.structure_digest = hash((recording.structure_digest, structure_token(found)))
        recording.epoch += 1
        return None, returned

    def _add_twin(self, target: torch.Tensor, stage: int) -> None:
        """From now on a placed copy stands in for an ordinary tensor."""
        with self.modules.at(stage):
            start = Arguments.of((target.detach().clone(),), {})
            self.twins.add(target, self._function(torch.clone, start))

    def _change_replicated(
        self, func: Function, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """``total += loss`` with an ordinary ``total``: goes on with its placed twin."""
        self.modules.before_change(target)
        if self.twins.get(target) is None:
            self._add_twin(target, self._stage(self.arguments(args, kwargs), None))
        result = self.torch_function(func, *self.twins.substitute(args, kwargs))
        return None if result is None else target

    def gradient_of(self, placed: PlacedTensor) -> torch.Tensor | None:
        """``placed.grad``: of a parameter, what earlier steps have left.

        Raises:
            SMPError: this step has a backward already, which has not run yet.
        """
        full = getattr(placed, "smp_parameter", None)
        if full is None:
            return None
        if any(recording.backwards for recording in self._recordings.values()):
            raise SMPError(
                f"the gradient of the parameter {full!r} was looked at inside an smp.step after "
                "model.backward(): gradients are there when the step function has returned"
            )
        return self.placement.parameter(full).grad

    def _require_gradient(self, target: Any, requires_grad: bool = True) -> Any:
        """``requires_grad_()``: a value that needs no gradient becomes a leaf from here on."""
        if bool(requires_grad) == target.requires_grad:
            return target
        if hasattr(target, "smp_parameter"):
            raise SMPError(
                f"requires_grad of the parameter {target.smp_parameter!r} was changed inside an smp.step, "
                f"where "
                "calls of earlier lines have not run yet: change it between steps, or detach() what shall "
                "not "
                "be trained"
            )
        if not requires_grad:
            raise SMPError(
                "requires_grad_(False) was called inside an smp.step on a result: write x = x.detach()"
            )
        leaf = self._function(as_leaf, self.arguments((target,), {}))
        target.smp_meta, target.smp_value, target.smp_stage = leaf.smp_meta, leaf.smp_value, leaf.smp_stage
        with torch._C.DisableTorchFunctionSubclass():
            target.requires_grad_()
        return target

    def _set_attribute(self, func: Function, args: tuple[Any, ...]) -> None:
        name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        target, value = args
        if name == "requires_grad" and type(target) is PlacedTensor:
            self._require_gradient(target, value)
            return
        if name == "grad" and value is None and hasattr(target, "smp_parameter"):
            self.gradient_of(target)
            self.placement.parameter(target.smp_parameter).grad = None
            return
        raise SMPError(
            f"tensor.{name} = ... inside an smp.step, on a tensor that lives on one stage or with one, "
            f"cannot be "
            "recorded: do it between steps, or with x.copy_(...) inside a module that is placed on one stage"
        )


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """What ``requires_grad_()`` makes of a result without a gradient."""
    return x.detach().requires_grad_()


def _weight(placed: PlacedTensor) -> tuple[int, int]:
    """Size, then age: parameters are the oldest."""
    return placed.smp_meta.num_bytes, getattr(placed, "smp_value", -1)
