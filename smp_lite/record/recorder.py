"""The recorder: turns what the user's function does into commands.

It hears of every module call and every torch function that touches a placed value, decides on which stage
it belongs, finds out what it would return (:mod:`.metadata`, cached), appends a command and hands back
placed values. Where a call lands:

- an owned module: on its stage;
- a torch function, a stateless module: on the stage of its largest input, so that residual sums, views and
  the loss go where the data is; among equals on that of the latest value, whose consumers follow there;
- a change in place of a value that views share memory with: where that memory is.

What Python needs to know now (``.item()``, ``if tensor:``, a data-dependent shape, a module that cannot run
on fake tensors) is asked of the *host*, which executes what has been recorded so far on all ranks and
shares the answer. That is right for any control flow and costs overlap, so it warns once a source line.

A replicated tensor changed in place with a placed operand (``total += loss``) gets a placed twin
(:mod:`.twins`), which stands in for it until the microbatch ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import SMPError
from .ambient import Ambient
from .binding import Binder, sharing_memory
from .calls import Arguments, ResultMeta
from .descriptions import Description, Descriptions, NeedsData, NotDescribed, content_token
from .placed import PlacedTensor
from .placement import FOREIGN, SPLIT, STATELESS, Placement
from .recording import Backward, Command, Recording
from .replay import Tape, refuse
from .signature import function_name, structure_token, token
from .source_line import CHECKPOINT_WITHOUT_EFFECT, warn_once_at_user_line
from .torch_functions import FROM_NUMBERS, LOOKS_AT_DATA, REFUSED, changes_first
from .twins import Twins


class Host(Protocol):
    """Who executes for the recorder while it is still recording."""

    def run_for_real(self, recording: Recording, command: Command) -> ResultMeta:
        """Executes all that is recorded, the command last; describes its result on every rank."""

    def fetch(self, recording: Recording, values: list[int]) -> list[torch.Tensor]:
        """Executes what the values depend on; returns their data, detached, on every rank."""


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
        self._captured: dict[int, list[tuple[Arguments, int]]] = {}
        self._twins = Twins()
        self._recordings: dict[int, Recording] = {}

    # The life of a step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self.placement.refresh(self):
            self.descriptions.signatures.forget()
        self.descriptions.signatures.new_step()
        self._recordings.clear()

    def begin_microbatch(self, microbatch_index: int) -> Recording:
        self.serial += 1
        self.recording = Recording(microbatch_index)
        self._recordings[self.serial] = self.recording
        return self.recording

    def end_microbatch(self) -> None:
        """Writes twins back and closes the recording."""
        assert self.recording is not None
        # All of them first: a tensor that has a twin would send the copy there.
        for target, twin in self._twins.take_all():
            if self.tape is not None:
                raise refuse("changes a tensor of its own in place with a result of the model")
            (value,) = self.host.fetch(self.recording, [self.value_of(twin)])
            with torch.no_grad():
                target.copy_(value)
        self._captured.clear()
        self.recording.complete = True
        self.recording = None

    def end_step(self) -> None:
        """Forgets the step; it may have failed in the midst of a microbatch."""
        self.recording = None
        self._twins = Twins()
        self._captured.clear()
        self._recordings.clear()

    # What interception calls ------------------------------------------------------------------------

    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``module(*args, **kwargs)`` during recording; ``call`` is the original ``Module.__call__``."""
        home = self.placement.home(module)
        if home == SPLIT:
            if module._backward_hooks or module._backward_pre_hooks:
                raise SMPError(
                    f"module {self.placement.name(module)!r} has backward hooks and is split over stages: "
                    "register them on modules that lie on one stage, or place it whole with smp.partition"
                )
            return call(module, *args, **kwargs)
        if home == FOREIGN and (
            any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        ):
            return call(module, *args, **kwargs)
        arguments = self._arguments(args, kwargs)
        if home < 0 and not any(type(tensor) is PlacedTensor for tensor in arguments.tensors):
            return call(module, *args, **kwargs)
        return self._record(self.placement.name(module), None, module, arguments, home)

    def torch_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function with at least one placed argument."""
        if self.recording is None:
            raise SMPError(
                f"{function_name(func)}() was called on a value that was made inside an smp.step and has no "
                "data here: return it from the step function, then it is valid on every rank"
            )
        name = getattr(func, "__name__", "")
        if name in LOOKS_AT_DATA:
            return self._forced(func, args, kwargs)
        if name in REFUSED:
            if name == "requires_grad_":
                wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                if bool(wanted) == args[0].requires_grad:
                    return args[0]
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
        return self._record(function_name(func), func, None, self._arguments(args, kwargs), STATELESS)

    def ordinary_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function without placed arguments."""
        if self._twins.among(args, kwargs):
            return self.torch_function(func, *self._twins.substitute(args, kwargs))
        name = getattr(func, "__name__", "")
        if func in FROM_NUMBERS and any(
            type(tensor) is PlacedTensor for tensor in Arguments.of(args, kwargs).tensors
        ):
            return self._forced(func, args, kwargs)
        if name == "__set__" and type(args[1]) is PlacedTensor:
            return self._set_attribute(func, args)
        if self._captured and changes_first(name, kwargs):
            self._keep_captured(kwargs.get("out", args[0] if args else None))
        if self.tape is not None:
            return self.tape.call(func, args, kwargs)
        return func(*args, **kwargs)

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
        for loss, gradient in zip(losses, gradients, strict=True):
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
                (gradient,) = self._fetch([gradient], "a gradient given to model.backward()")
            elif self.tape is not None and self.tape.slot(gradient) is not None:
                raise refuse("gives model.backward() a gradient made from its inputs")
            values.append(self.value_of(loss))
        self.recording.backwards.append(Backward(tuple(values), tuple(gradients)))

    def placed_for(self, leaf: Any) -> PlacedTensor | None:
        """The placed tensor that a leaf of a result is, or that stands in for it."""
        if type(leaf) is PlacedTensor:
            return leaf
        return self._twins.get(leaf)

    # Recording one command ------------------------------------------------------------------------------

    def value_of(self, placed: PlacedTensor) -> int:
        """The value that a placed tensor stands for now."""
        recording = self.recording
        assert recording is not None
        full = getattr(placed, "smp_parameter", None)
        if full is None:
            return placed.smp_value
        if full not in recording.parameters:
            value = recording.new_value(placed.smp_stage, placed.smp_meta, is_parameter=True)
            command = Command(
                index=len(recording.commands),
                stage_index=placed.smp_stage,
                label=full,
                arguments=Arguments([], None),
                sources=[],
                ambient=Ambient.current(),
                epoch=recording.epoch,
                parameter=full,
                outputs=(value,),
            )
            mark = token(full)
            recording.add(command, ((),), (mark, mark))
            recording.parameters[full] = value
        return recording.parameters[full]

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Flattened arguments; twins and values of earlier microbatches are replaced."""
        arguments = Arguments.of(args, kwargs)
        for i, tensor in enumerate(arguments.tensors):
            if type(tensor) is PlacedTensor:
                if tensor.smp_recorder is not self:
                    raise SMPError("a value of another model's step was used: return it from its step first")
                if not hasattr(tensor, "smp_parameter") and tensor.smp_microbatch != self.serial:
                    self._replace(arguments, i, self._from_earlier_microbatch(tensor))
            elif (twin := self._twins.get(tensor)) is not None:
                self._replace(arguments, i, twin)
        return arguments

    @staticmethod
    def _replace(arguments: Arguments, i: int, tensor: torch.Tensor) -> None:
        arguments.tensors[i] = arguments.leaves[arguments.positions[i]] = tensor

    def _from_earlier_microbatch(self, tensor: PlacedTensor) -> torch.Tensor:
        recording = self._recordings.get(tensor.smp_microbatch)
        if recording is None:
            raise SMPError(
                "a value made in an earlier smp.step was used in this one and has no data any more: "
                "return it from its step function and pass it in"
            )
        if tensor.smp_meta.requires_grad and torch.is_grad_enabled():
            raise SMPError(
                "a value of one microbatch was used in another with its gradient: microbatches are "
                "independent, so detach() it first"
            )
        if self.tape is not None:
            raise refuse("uses a tensor of one microbatch in another")
        (value,) = self.host.fetch(recording, [tensor.smp_value])
        assert self.recording is not None
        self.recording.epoch += 1  # what it has recorded so far ran too
        return value

    def _record(
        self,
        label: str,
        func: Callable[..., Any] | None,
        module: nn.Module | None,
        arguments: Arguments,
        home: int,
    ) -> Any:
        recording = self.recording
        assert recording is not None
        ambient = Ambient.current()
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            warn_once_at_user_line(CHECKPOINT_WITHOUT_EFFECT)
        what = module if module is not None else func
        assert what is not None
        described = self.descriptions.describe(label, what, arguments, ambient)
        if type(described) is NeedsData:
            return self._forced(func, *arguments.build(arguments.tensors))
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
            function=func,
            module=module,
        )
        if not isinstance(described, Description):
            return self._run_for_real(command, described)
        self._capture(arguments, sources)
        returned, links = self._binder().bind(command, described.meta)
        recording.add(command, links, (described.content, described.structure))
        return returned

    def _binder(self) -> Binder:
        assert self.recording is not None
        return Binder(self.recording, self, self.serial)

    def _stage(self, arguments: Arguments, described: Description | NotDescribed | None) -> int:
        """Where a call without a home of its own goes."""
        placed = [tensor for tensor in arguments.tensors if type(tensor) is PlacedTensor]
        if isinstance(described, Description):
            for changed in described.meta.changed:
                target = arguments.tensors[changed.argument]
                if type(target) is PlacedTensor and (
                    hasattr(target, "smp_parameter") or len(sharing_memory(target)) > 1
                ):
                    return target.smp_stage
        if not placed:
            raise SMPError("a call without placed arguments cannot be placed")
        return max(placed, key=_weight).smp_stage

    def _capture(self, arguments: Arguments, sources: list[int]) -> None:
        """Remembers ordinary tensors that a command will read later."""
        for i, source in enumerate(sources):
            if source < 0 and (storage := _storage(arguments.tensors[i])) is not None:
                self._captured.setdefault(storage, []).append((arguments, i))

    def _keep_captured(self, target: Any) -> None:
        """Before an ordinary tensor changes: commands that captured it keep its present value."""
        storage = _storage(target) if isinstance(target, torch.Tensor) else None
        for arguments, i in self._captured.pop(storage, ()):  # type: ignore[arg-type]
            with torch.no_grad():
                present = arguments.tensors[i]
                copy = self.tape.call(torch.clone, (present,), {}) if self.tape else present.clone()
                self._replace(arguments, i, copy)

    # Decisions on data ------------------------------------------------------------------------------------

    def _run_for_real(self, command: Command, unknown: NotDescribed) -> Any:
        """Records a call that only its execution can describe, and executes up to it."""
        recording = self.recording
        assert recording is not None
        recording.epoch += 1
        command.epoch = recording.epoch
        mark = content_token(command.label, command.arguments)
        recording.add(command, (), (mark, mark))
        meta = self.host.run_for_real(recording, command)
        self._captured.clear()
        returned, links = self._binder().bind(command, meta)
        self.descriptions.learn(unknown, command.label, command.arguments, meta)
        recording.links[-1] = links
        recording.structure_digest = hash((recording.structure_digest, structure_token(meta)))
        recording.epoch += 1
        return returned

    def _forced(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that needs data: fetches its placed arguments and calls it everywhere."""
        arguments = self._arguments(args, kwargs)
        placed = [tensor for tensor in arguments.tensors if type(tensor) is PlacedTensor]
        fetched = iter(self._fetch(placed, f"{function_name(func)}()"))
        real = [next(fetched) if type(t) is PlacedTensor else t for t in arguments.tensors]
        args, kwargs = arguments.build(real)
        return func(*args, **kwargs)

    def _fetch(self, placed: list[PlacedTensor], what: str) -> list[torch.Tensor]:
        assert self.recording is not None
        if self.tape is not None:
            raise refuse(f"looks at the data of a tensor ({what})")
        warn_once_at_user_line(
            f"{what} needs the data of a tensor inside an smp.step: all ranks wait for it here. That is "
            "correct, but the pipeline cannot overlap across it"
        )
        values = self.host.fetch(self.recording, [self.value_of(tensor) for tensor in placed])
        self.recording.epoch += 1
        return values

    def _change_replicated(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """``total += loss`` with an ordinary ``total``: goes on with its placed twin."""
        if self._twins.get(target) is None:
            arguments = self._arguments(args, kwargs)
            stage = self._stage(arguments, None)
            start = Arguments.of((target.detach().clone(),), {})
            placed = self._record("clone", torch.clone, None, start, stage)
            self._twins.add(target, placed)
        result = self.torch_function(func, *self._twins.substitute(args, kwargs))
        return None if result is None else target

    def _set_attribute(self, func: Any, args: tuple[Any, ...]) -> None:
        name = getattr(func.__self__, "__name__", "")
        target, value = args
        if name == "requires_grad" and type(target) is PlacedTensor:
            target.requires_grad_(value)
            return
        raise SMPError(
            f"tensor.{name} = ... on a tensor that lives on one stage cannot be recorded: "
            "move it into a module that is placed on one stage"
        )


def _storage(tensor: torch.Tensor) -> int | None:
    """Identifies the memory of an ordinary tensor."""
    with torch._C.DisableTorchFunction():  # no call of the user's
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _weight(placed: PlacedTensor) -> tuple[int, int]:
    """Size, then age: parameters are the oldest."""
    return placed.smp_meta.num_bytes, getattr(placed, "smp_value", -1)
