"""The recorder: turns what the user's function does into commands.

It hears of every module call and every torch function that touches a placed value, replaces what stands for
something else (:mod:`.ordinary_tensors`), and has a command written (:mod:`.command_writer`), whose results
are placed values again. What Python needs to know now (:mod:`.forced`) is asked of the *host*, which executes
what has been recorded so far on all ranks and shares the answer. That is right for any control flow and costs
overlap, so it warns once a source line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import SMPError
from ..backward.checkpointed_runs import CheckpointedRuns
from ..backward.saved_state import SavedState
from ..backward.state import BackwardState
from ..buffers.module_buffers import ModuleBuffers
from ..commands.recording import Recording
from ..commands.replay import Tape, refuse
from ..describe.descriptions import Descriptions
from ..parameters.away import is_away, needed
from ..parameters.placement import Placement
from ..parameters.split_reads import members_of, refuse_split_read
from ..state.ambient import FUNCTORCH, Ambient, refuse_transformations
from ..state.between import ReadBetween
from ..state.draws import Draws
from ..values.calls import Arguments
from ..values.placed import PlacedTensor, holds_placed
from ..values.torch_functions import (
    DETACHES,
    FROM_NUMBERS,
    LOOKS_AT_DATA,
    REFUSED,
    SHARES_MEMORY,
    changed_by,
    changes_first,
    function_name,
)
from .collectives import EndedWork, as_it_runs, is_collective
from .command_writer import CommandWriter
from .forced import Forced, Host
from .gradients import backward, deep_copy, gradient_of, require_gradient, set_attribute
from .module_calls import ModuleCalls
from .ordinary_tensors import PARAMETERS, OrdinaryTensors
from .repeated import RepeatedCalls
from .value_hooks import ON_LEAVES, refuse_on_module, refuse_on_parameter, refuse_removed, register_hook

__all__ = ["Recorder"]

Function = Callable[..., Any]


class Recorder:
    """Records one step at a time; keeps its caches from step to step."""

    def __init__(self, placement: Placement, host: Host) -> None:
        self.placement = placement
        self.host = host
        self.descriptions = Descriptions()
        self.suspended = False
        self.has_split_parameters = bool(placement.split)
        self.serial = -1  # counts microbatches over all steps
        self.recording: Recording | None = None
        self.tape: Tape | None = None  # set while a step is recorded for replay
        self.ranks_of_stage: Callable[[int], Collection[int]] = lambda stage: ()
        self.num_microbatches = 1
        self.num_modes = 0  # torch's own modes and ours, without the user's
        self.draws = Draws()
        self.runs = CheckpointedRuns(placement)
        self.modules = ModuleCalls(self)
        self.buffers = ModuleBuffers(self)
        self.descriptions.inference.is_changing = self.buffers.held.is_read
        self.read_between = ReadBetween()
        self.backward_state = BackwardState(placement, self.descriptions, self.read_between)
        self.backward_state.changing_buffers = self.buffers.changing
        self.saved_state = SavedState()
        self.survivors: list[tuple[int, PlacedTensor]] = []
        self.forced = Forced(self)
        self.recordings: dict[int, Recording] = {}
        self.ordinary = OrdinaryTensors(self)
        self.writer = CommandWriter(self)
        self.repeated = RepeatedCalls(self)

    @property
    def not_listening(self) -> bool:
        """Whether what happens now is the library's own doing, and none of the user's code."""
        return self.suspended or self.descriptions.inferring or self.recording is None

    # The life of a step ---------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int, *, strict: bool) -> None:
        """A step begins; a ``strict`` one looks for changes of Python state that were not heard."""
        self.num_microbatches = num_microbatches
        self.descriptions.inference.is_repeated = num_microbatches > 1
        if self.placement.refresh(self):
            self.descriptions.signatures.forget()
            self.repeated.forget()
        self.descriptions.signatures.new_step()
        self.modules.begin_step(strict=strict)
        self.buffers.begin_step()
        self.draws.begin_step()
        self.read_between.clear()
        self.ordinary.forget_captured()
        self.backward_state.begin_step(num_microbatches)
        self.saved_state.begin_step()
        self.recordings.clear()
        self.survivors.clear()

    def begin_microbatch(self, microbatch_index: int) -> Recording:
        self.serial += 1
        self.recording = Recording(microbatch_index)
        self.recordings[self.serial] = self.recording
        self.num_modes = Ambient.current().num_modes
        self.writer.begin_microbatch(self.recording)
        return self.recording

    def end_microbatch(self) -> None:
        """Writes placed values back that stand for ordinary tensors, and closes the recording."""
        assert self.recording is not None
        self.ordinary.write_back()
        if self.descriptions.has_described and any(True for _ in self._alive()):
            gc.collect()  # errors that a fake run, or torch's imports for it, caught hold the user's frames
        self.descriptions.has_described = False
        for placed in self._alive():
            self.survivors.append((self.recording.microbatch_index, placed))
            self.recording.needed.add(placed.smp_value)
        self.writer.end_microbatch()
        self.ordinary.forget()
        self.recording.complete = True
        self.recording = None

    def _alive(self) -> Iterator[PlacedTensor]:
        """Values of this microbatch that somebody still holds, but for those that are needed anyway."""
        assert self.recording is not None
        for reference in self.writer.made:
            placed = reference()
            if placed is not None and placed.smp_value not in self.recording.needed:
                yield placed

    def drew_by_itself(self) -> bool:
        """Whether this step has drawn random numbers by ordinary calls, which are not recorded."""
        self.draws.look()
        return self.draws.drew_otherwise

    def end_step(self) -> None:
        """Forgets the step; it may have failed in the midst of a microbatch."""
        self.recording = None
        self.ordinary.end_step()
        self.modules.end_step()
        self.buffers.end_step()
        self.backward_state.end_step()
        self.recordings.clear()
        self.writer.end_microbatch()

    # What interception calls ------------------------------------------------------------------------

    def call_module(
        self, module: nn.Module, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``module(*args, **kwargs)`` during recording; ``call`` is the original ``Module.__call__``."""
        return self.modules.call(module, call, args, kwargs)

    def meet(self, cls: type[torch.autograd.Function]) -> None:
        """An autograd function is applied, here or inside a closed call."""
        self.backward_state.meet(cls)

    def hears_hook(self, hook: Any) -> None:
        """A hook is put on a tensor, or on what autograd saves: Python that a backward runs."""
        self.backward_state.hears_hook(hook, of_recording=not self.not_listening)

    def hears_hook_of_run(self, parameter: torch.Tensor) -> None:
        """A forward that runs puts a hook on a parameter, which its description did not show."""
        refuse_on_parameter(self, self.placement.alias(parameter), "register_hook")

    def hears_backward_hook(self, module: nn.Module) -> None:
        """Recorded code puts a backward hook on a module."""
        refuse_on_module(self, module)

    def hears_removal(self, handle: RemovableHandle) -> None:
        """Recorded code takes a hook away."""
        table = handle.hooks_dict_ref()
        if (
            table is not None
            and handle.id in table
            and any(each.commands for each in self.recordings.values())
        ):
            refuse_removed(self, table)

    def hears_checkpoint(self) -> None:
        """A backward will run forward code again."""
        self.backward_state.hears_checkpoint()

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is about to be set, or deleted."""
        self.modules.attribute_set(module, name, value)

    def buffer_read(self, module: nn.Module, name: str, value: Any) -> Any:
        return self.buffers.read(module, name, value)

    def buffer_set(self, module: nn.Module, name: str, value: Any) -> None:
        self.buffers.set(module, name, value)

    def torch_function(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function with at least one placed argument."""
        if self.descriptions.inferring:
            self.descriptions.inference.touched_placed = True
            raise SMPError("a value of the step was used by code that runs on fake tensors")
        if self.recording is None or self.suspended:
            return self.forced.after_the_step(func, args, kwargs)
        found = self.repeated.find(func, args, kwargs)
        if found is not None:
            return self.repeated.write(found)
        if is_collective(func):
            stage = self.writer.stage(self.arguments(args, kwargs), None)
            args, kwargs, was_async = as_it_runs(func, args, kwargs, stage, self.ranks_of_stage(stage))
            if was_async:
                self.torch_function(func, args, kwargs)
                return EndedWork()
        name = getattr(func, "__name__", "")
        if name in LOOKS_AT_DATA:
            return self.forced.call(func, args, kwargs)
        if name == "requires_grad_":
            return require_gradient(self, *args, **kwargs)
        if name in ON_LEAVES:
            if args[0].smp_parameter is not None:
                refuse_on_parameter(self, args[0].smp_parameter, name)
            elif name == "register_hook":
                return register_hook(self, *args, **kwargs)
        if name in REFUSED:
            raise SMPError(
                f"{function_name(func)}() was called inside an smp.step on a value that lives on one "
                f"stage: {REFUSED[name]}"
            )
        if name == "__deepcopy__":
            return deep_copy(self, args[0])
        if name == "__set__":
            return set_attribute(self, func, args)
        if changes_first(name, kwargs):
            target = kwargs.get("out", args[0] if args else None)
            if type(target) is not PlacedTensor and isinstance(target, torch.Tensor):
                return self.ordinary.change_replicated(func, target, args, kwargs)
        arguments = self.arguments(args, kwargs, detached=name in DETACHES)
        if any(type(tensor) is PlacedTensor for tensor in arguments.tensors):
            return self.writer.function(func, arguments)
        args, kwargs = arguments.build(arguments.tensors)
        return self.ordinary_function(func, args, kwargs)

    def ordinary_function(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function without placed arguments."""
        twins = self.ordinary.twins
        if twins:
            self.ordinary.before_views_of_twins(Arguments.of(args, kwargs).tensors)
        if (twins and twins.among(args, kwargs)) or any(type(tensor) in PARAMETERS for tensor in args):
            replaced = self.ordinary.stand_ins(args, kwargs)
            if replaced is not None:
                return PlacedTensor.called(func, *replaced)
        name = getattr(func, "__name__", "")
        if self.buffers.seen.stale and name != "__get__":
            self.buffers.seen.refresh(members_of(args, kwargs))
        if name == "__get__":
            if getattr(func, "__self__", None) is torch.Tensor.grad:
                self._refuse_gradient_to_come(args[0])
            return func(*args, **kwargs) if self.tape is None else self.tape.call(func, args, kwargs)
        if func in FROM_NUMBERS and (holds_placed(args) or holds_placed(kwargs.values())):
            return self.forced.call(func, args, kwargs)
        if name == "__set__" and type(args[1]) is PlacedTensor:
            return set_attribute(self, func, args)
        if name in SHARES_MEMORY:
            changed = [*args[:1]]
            self.buffers.seen.note_arrays(changed)
        else:
            changed = [*args[:1]] if _sets_data(func, name) else changed_by(func, name, args, kwargs)
            self.ordinary.refuse_viewed(changed)
            for target in changed:
                self.ordinary.refuse_in_parameter(target)
        for target in changed:
            self.buffers.before_change(target)
            self.ordinary.keep_captured(target)
        if self.tape is not None:
            return self.tape.call(func, args, kwargs)
        return func(*args, **kwargs)

    @property
    def has_stale_buffers(self) -> bool:
        """Whether code may hold buffers that calls have changed since."""
        return bool(self.buffers.seen.stale)

    def before_function(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch function is about to be called: such buffers among its arguments are brought up to date."""
        self.buffers.seen.before(func, args, kwargs)

    def refuse_split_reads(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Raises:
            SMPError: the call is code's that takes a rank's part of a parameter for the whole.
        """
        for arg in members_of(args, kwargs):
            if type(arg) is PlacedTensor or type(arg) in PARAMETERS:
                name = self.placement.split_name(arg)
                if name is not None:
                    refuse_split_read(name, func, kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """``model.backward``: notes from where the backward pass starts."""
        backward(self, tensors, grad_tensors)

    def gradient_of(self, placed: PlacedTensor) -> torch.Tensor | None:
        """``placed.grad``: of a parameter, what earlier steps have left."""
        return gradient_of(self, placed)

    def viewed(self, tensor: torch.Tensor, views: list[Any]) -> None:
        """A call has returned a view of an ordinary tensor."""
        self.ordinary.note_views(tensor, views)

    def attributes_of(self, full: str) -> dict[str, Any]:
        """What Python code has set on a parameter."""
        found = self.placement.parameter(full).__dict__
        return {name: value for name, value in found.items() if not name.startswith("smp_")}

    def _refuse_gradient_to_come(self, tensor: torch.Tensor) -> None:
        """``tensor.grad`` of an ordinary tensor, which backwards of this step may give a gradient."""
        gives = any(recording.backwards and recording.inputs for recording in self.recordings.values())
        with torch._C.DisableTorchFunction():
            wants = tensor.requires_grad
        if gives and wants:
            raise SMPError(
                f"the gradient of a tensor of shape {tuple(tensor.shape)} was looked at inside an smp.step "
                "after model.backward(): gradients are there when the step function has returned"
            )

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, detached: bool = False
    ) -> Arguments:
        """Flattened arguments; what stands for something else is replaced by it.

        Args:
            detached: no gradient will be wanted of values of earlier microbatches.
        """
        arguments = Arguments.of(args, kwargs)
        if self.ordinary.twins:
            self.ordinary.before_views_of_twins(arguments.tensors)
        for i, tensor in enumerate(arguments.tensors):
            if type(tensor) is PlacedTensor:
                if tensor.smp_recorder is not self:
                    raise SMPError("a value of another model's step was used: return it from its step first")
                if tensor.smp_microbatch != self.serial and tensor.smp_parameter is None:
                    arguments.replace(i, self._from_earlier_microbatch(tensor, detached=detached))
            elif (found := self.ordinary.stand_in(tensor)) is not None:
                arguments.replace(i, found)
            elif is_away(tensor):
                raise needed("a step used it", [tensor])
        if self.buffers.seen.stale:
            self.buffers.seen.refresh(arguments.tensors)
        return arguments

    def _from_earlier_microbatch(self, tensor: PlacedTensor, *, detached: bool) -> torch.Tensor:
        recording = self.recordings.get(tensor.smp_microbatch)
        if recording is None:
            return self.forced.data_of(tensor)
        if tensor.smp_meta.requires_grad and torch.is_grad_enabled() and not detached:
            raise SMPError(
                "a value of one microbatch was used in another with its gradient: microbatches are "
                "independent, so detach() it first"
            )
        if self.tape is not None:
            raise refuse("uses a tensor of one microbatch in another")
        return self.forced.fetch_from(recording, tensor)

    def ambient(self) -> Ambient:
        """The torch state around the line that runs now.

        Raises:
            SMPError: it is inside a transformation of torch.func.
        """
        ambient = Ambient.current()
        if ambient.num_modes >= FUNCTORCH:
            refuse_transformations()
        return ambient

    # What only running shows --------------------------------------------------------------------------------

    def run_all_recorded(self) -> None:
        """Executes everything that has been recorded so far."""
        assert self.recording is not None
        if self.tape is not None:
            raise refuse("changes the state of modules that have been called")
        self.host.fetch(self.recording, [])
        self.recording.epoch += 1
        self.ordinary.forget_captured()


def _sets_data(func: Function, name: str) -> bool:
    """``tensor.data = ...``: other memory for a tensor that commands may have captured."""
    return name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
