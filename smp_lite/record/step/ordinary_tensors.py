"""Ordinary tensors within a step: those that every rank holds, as the user's function made or got them.

Three things happen to them. One that is changed in place with a placed operand (``total += loss``) cannot be
computed on every rank: from then on a placed twin (:mod:`.twins`) stands in for it, and its value is written
back when the microbatch ends. One that requires a gradient becomes a placed *input*, whose gradient every
rank gets at the end of the step. One that a command reads is remembered: if it changes before the command
runs, the command keeps what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import SMPError
from ..commands.binding import sharing_memory
from ..commands.replay import refuse
from ..describe.descriptions import Description
from ..describe.signature import tensor_meta
from ..parameters.away import AwayParameter, is_away
from ..values.calls import Arguments
from ..values.memory import digest_of, is_shared, storage_of, version_of
from ..values.parts import contents_of
from ..values.placed import PlacedTensor
from .twins import Twins

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["PARAMETERS", "OrdinaryTensors"]

PARAMETERS = (nn.Parameter, AwayParameter)


class OrdinaryTensors:
    """The ordinary tensors of a recorder's present microbatch."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.twins = Twins()
        # Of this step, by memory: arguments, which, the microbatch, and whether its backward reads it.
        self._captured: dict[int, list[tuple[Arguments, int, int, bool]]] = {}
        # Memory that backwards read: of commands of this step that have run, of buffers in this microbatch.
        self._saved: set[int | None] = set()
        self._copied: set[int | None] = set()
        # Of commands that have not run: arguments, which, the tensor and its version.
        self._unread: list[tuple[Arguments, int, torch.Tensor, int]] = []
        self._kept: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # of this microbatch: version, copy
        # Of the batch, what numpy may change; storage, version, digest. Copying it would double its memory.
        self._watched: dict[int, tuple[torch.Tensor, int, int]] = {}
        # Of the model in this step, by memory; None: nobody has asked.
        self._parameters: dict[int | None, str] | None = None
        self._batch: frozenset[int | None] = frozenset()
        self._is_strict = self._is_compared = False
        # If this step is one that is checked: what its commands have captured, beside the batch.
        self.contents: list[tuple[tuple[int, ...], int]] = []
        self._inputs: dict[int, tuple[torch.Tensor, PlacedTensor]] = {}
        # Of this step, by memory: a tensor of which calls have returned views, and weak references to those.
        self._viewed: dict[int | None, list[tuple[torch.Tensor, list[Any]]]] = {}
        self.changes_earlier = False  # in this step, what commands of earlier microbatches have captured

    def begin_step(self, batch: Iterable[torch.Tensor], *, strict: bool, compared: bool) -> None:
        """A step begins.

        Args:
            batch: the arguments of the step function.
            strict: see whether code changes them unheard.
            compared: other ranks have captured the same, which is looked at in a strict step.
        """
        self._batch = frozenset(map(storage_of, batch))
        self._is_strict = strict
        self._is_compared = strict and compared
        self.changes_earlier = False
        self.contents.clear()
        self._saved.clear()
        self._parameters = None

    def forget(self) -> None:
        """The microbatch is over."""
        self.twins = Twins()
        self._kept.clear()
        self._copied.clear()
        self._inputs.clear()

    def end_step(self) -> None:
        """The step is over; it may have failed in the midst of a microbatch."""
        self.forget()
        self.forget_captured()
        self._viewed.clear()

    # What stands in for them --------------------------------------------------------------------------------

    def write_back(self) -> None:
        """What stands in for ordinary tensors and for buffers is fetched and written into them."""
        # All of them first: a tensor that has a twin would send the copy there.
        for target, twin in self.twins.take_all():
            if self.recorder.tape is not None:
                raise refuse("changes a tensor of its own in place with a result of the model")
            (value,) = self.recorder.forced.fetch_quietly([twin])
            with torch.no_grad():
                target.copy_(value)
        rebound, self.recorder.buffers.rebound = self.recorder.buffers.rebound, {}
        for (_, name), module in rebound.items():
            table = module._buffers
            placed = getattr(table, "real", table).get(name)
            if type(placed) is PlacedTensor:
                (value,) = self.recorder.forced.fetch_quietly([placed])
                table[name] = value
                full = f"the buffer {self.recorder.placement.name(module)}.{name} as bound before a call"
                recording = self.recorder.recording
                if recording is not None and placed.smp_microbatch == self.recorder.serial:
                    for member in sharing_memory(placed):  # what has been written there would not follow
                        recording.values[member.smp_value].lies_in = full

    def stand_ins(
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
        if twin is None and type(tensor) in PARAMETERS:
            full = self.recorder.placement.alias(tensor)
            return self.recorder.placement.placed_parameter(full) if full is not None else None
        return twin

    def placed_for(self, leaf: Any) -> PlacedTensor | None:
        """The placed tensor that a leaf of a result is, or that stands in for it."""
        if type(leaf) is PlacedTensor:
            return leaf
        return self.twins.get(leaf)

    def before_views_of_twins(self, tensors: list[torch.Tensor]) -> None:
        """Another view of memory that a twin stands for must see what is in it by now."""
        if not self.twins.overlap(tensors):
            return
        for tensor in tensors:
            if type(tensor) is not PlacedTensor and self.twins.get(tensor) is None:
                base = base_of(tensor)
                if base is not None and self.twins.get(base) is not None:
                    self._add_view(tensor, base)
        if not self.twins.overlap(tensors):
            return
        if self.twins.need_gradients():
            raise SMPError(
                "a view of a tensor was used after that tensor had been changed in place with a result of "
                "the model, through which a gradient flows: make the view after the change, or clone() "
                "before it"
            )
        self.write_back()

    def add_twin(self, target: torch.Tensor, stage: int) -> None:
        """From now on a placed copy stands in for an ordinary tensor, or what is a view of its base's."""
        self.refuse_viewed([target])
        self.recorder.buffers.kept.before_change(target)
        base = base_of(target)
        whole = target if base is None else base
        with self.recorder.modules.at(stage), torch.enable_grad():
            # What wants a gradient, as a product of a parameter outside of the model, goes on wanting it.
            start = Arguments.of((whole if _requires_grad(whole) else whole.detach().clone(),), {})
            count = len(self.contents)
            twin = self.recorder.writer.function(torch.clone, start)
            self.twins.add(whole, twin, users=1 if base is None else 2)
            del self.contents[count:]  # it may be memory that is about to be written for the first time
        if base is not None:
            self._add_view(target, base)

    def _add_view(self, view: torch.Tensor, base: torch.Tensor) -> None:
        """From now on the same view of the base's twin stands in for a view."""
        with torch._C.DisableTorchFunction():  # the base has a twin already, which would be asked
            place = tuple(view.shape), view.stride(), view.storage_offset() - base.storage_offset()
        arguments = Arguments.of((self.twins.get(base), *place), {})
        with torch.enable_grad():  # as the view was made; or else torch itself has no gradient through it
            self.twins.add_view(view, self.recorder.writer.function(torch.as_strided, arguments))

    def change_replicated(
        self, func: Callable[..., Any], target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """``total += loss`` with an ordinary ``total``: goes on with its placed twin."""
        self.refuse_in_parameter(target)
        self.recorder.buffers.before_change(target)
        if self.twins.get(target) is None:
            arguments = self.recorder.arguments(args, kwargs)
            if self.twins.get(target) is None:  # it has become a view of its base's twin otherwise
                self.add_twin(target, self.recorder.writer.stage(arguments, None))
        result = self.recorder.torch_function(func, *self.twins.substitute(args, kwargs))
        return None if result is None else target

    def note_views(self, tensor: torch.Tensor, views: list[Any]) -> None:
        """A call has returned a view of an ordinary tensor: (weak reference, family) for it and its views."""
        self._viewed.setdefault(storage_of(tensor), []).append((tensor, views))

    def refuse_viewed(self, targets: Iterable[torch.Tensor]) -> None:
        """Ordinary tensors are about to change.

        Raises:
            SMPError: a view of one is held, which lives on a stage and would not follow.
        """
        for target in targets if self._viewed else ():
            views = [view for _, views in self._viewed.get(storage_of(target), ()) for view, _ in views]
            if any(view() is not None for view in views):
                raise SMPError(
                    f"a tensor of shape {tuple(target.shape)} is changed in place while a view of it is held "
                    "that a call has returned: that lives on a stage, and would not follow. Change a clone() "
                    "of it, or let the call return one"
                )

    # Those that want a gradient -----------------------------------------------------------------------------

    def with_inputs(self, arguments: Arguments, stage: int | None) -> None:
        """Ordinary tensors that require a gradient become placed inputs."""
        for i, tensor in enumerate(arguments.tensors):
            if type(tensor) is not PlacedTensor and _requires_grad(tensor):
                if not torch.is_grad_enabled():
                    return
                if stage is None:
                    placed = [t.smp_stage for t in arguments.tensors if type(t) is PlacedTensor]
                    stage = placed[0] if placed else 0
                arguments.replace(i, self._input(tensor, stage))

    def forget_inputs(self) -> None:
        """Who reads one from here on has its gradient added apart."""
        self._inputs.clear()

    def _input(self, tensor: torch.Tensor, stage: int) -> PlacedTensor:
        """A placed value for an ordinary tensor of which the gradient is wanted."""
        found = self._inputs.get(id(tensor))
        if found is not None:
            return found[1]
        recording = self.recorder.recording
        assert recording is not None
        if self.recorder.tape is not None:
            raise refuse("wants the gradient of a tensor that is no parameter")
        meta = tensor_meta(tensor)
        placed = PlacedTensor(meta)
        placed.smp_recorder, placed.smp_stage, placed.smp_microbatch = (
            self.recorder,
            stage,
            self.recorder.serial,
        )
        placed.smp_value = recording.new_value(stage, meta)
        self.recorder.writer.source(f"input {len(recording.inputs)}", stage, placed.smp_value, input=tensor)
        recording.inputs.append((placed.smp_value, tensor))
        self._inputs[id(tensor)] = (tensor, placed)
        return placed

    # Those that commands read -----------------------------------------------------------------------------

    @staticmethod
    def first_changed(described: Any, arguments: Arguments) -> torch.Tensor | None:
        """An ordinary tensor that the call changes in place, though every rank holds it."""
        if isinstance(described, Description):
            for changed in described.meta.changed:
                target = arguments.tensors[changed.argument]
                if type(target) is not PlacedTensor:
                    return target
        return None

    def forget_captured(self) -> None:
        """All commands so far have run, or never will."""
        self._saved.update(
            storage for storage, captured in self._captured.items() if any(saved for *_, saved in captured)
        )
        self._captured.clear()
        self._unread.clear()
        self._kept.clear()
        self._watched.clear()

    def before_running(self, *, all_recorded: bool) -> None:
        """The commands are about to read what they have captured.

        Args:
            all_recorded: all of them run now.

        Raises:
            SMPError: a tensor has changed where no torch function was seen, or has other memory; or the batch
                has changed, and torch did not hear of it.
        """
        for tensor, version, digest in self._watched.values():
            if version_of(tensor) == version and digest_of(tensor) != digest:
                raise _changed_unheard(tensor)
        for storage, captured in self._captured.items():
            for arguments, i, _, _ in captured:
                if storage_of(arguments.tensors[i]) != storage:
                    raise SMPError(
                        f"a tensor of shape {tuple(arguments.tensors[i].shape)} was given other memory "
                        "(set_) after a call had read it, and before the call could run: give it new numbers "
                        "by copy_, or use another tensor"
                    )
        for arguments, i, tensor, version in self._unread:
            if version_of(tensor) != version and arguments.tensors[i] is tensor:
                raise SMPError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place after a call had read it, "
                    "and before the call could run, by code whose torch functions are not seen (a scripted "
                    "function, an extension): give the call a clone()"
                )
        if all_recorded:
            self._unread.clear()

    def capture(
        self,
        arguments: Arguments,
        sources: list[int],
        saved: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Remembers ordinary tensors that a command will read later, and takes those that numpy may change.

        Args:
            arguments: of the command.
            sources: for each tensor among them the value that it is; negative: an ordinary tensor.
            saved: the arguments that the command's backward will read again.
            written: those that the command changes, of which nobody may have written the numbers yet.
        """
        for i, source in enumerate(sources):
            tensor = arguments.tensors[i]
            if source < 0 and (storage := storage_of(tensor)) is not None:
                is_saved = i in saved and torch.is_grad_enabled()
                self._captured.setdefault(storage, []).append((arguments, i, self.recorder.serial, is_saved))
                if i not in written:
                    self._unread.append((arguments, i, tensor, version_of(tensor)))
                if self.recorder.tape is None and is_shared(tensor):
                    self._guard(tensor, storage)
                elif is_saved and self.recorder.buffers.is_changing(storage):
                    self.keep_captured(tensor)  # a later microbatch may change it before the backward
                    self._copied.add(storage)
                if self._is_compared and storage not in self._batch and i not in written:
                    self.contents.append((tuple(tensor.shape), contents_of(tensor)))

    def _guard(self, tensor: torch.Tensor, storage: int) -> None:
        if storage not in self._batch:
            self.keep_captured(tensor)
        elif self._is_strict and id(tensor) not in self._watched:
            self._watched[id(tensor)] = (tensor, version_of(tensor), digest_of(tensor))

    def keep_captured(self, target: Any, *, is_heard: bool = True) -> None:
        """Before an ordinary tensor changes: commands that captured it keep its present value.

        Args:
            is_heard: autograd will notice the change.

        Raises:
            SMPError: it will not, and the backward of a command of this microbatch reads the tensor.
        """
        storage = storage_of(target) if isinstance(target, torch.Tensor) else None
        if self._watched:
            self._watched = {
                key: kept for key, kept in self._watched.items() if storage_of(kept[0]) != storage
            }
        captured = self._captured.get(storage, ())  # type: ignore[arg-type]
        if any(serial != self.recorder.serial for _, _, serial, _ in captured):
            self.changes_earlier = True
            self.recorder.host.settle()  # what has run by now may still have a backward to come
        for arguments, i, serial, is_saved in self._captured.pop(storage, ()):  # type: ignore[arg-type]
            with torch.no_grad(), torch._C.DisableTorchFunction():
                present = arguments.tensors[i]
                tape = self.recorder.tape
                copy = present.clone() if tape is None else tape.copied(arguments, i)
                if is_saved and serial == self.recorder.serial:
                    if not is_heard:
                        raise _changed_unheard(present)
                    self._kept.append((present, version_of(present), copy))
                arguments.replace(i, copy)

    def refuse_in_parameter(self, target: torch.Tensor) -> None:
        """An ordinary tensor is about to change in place.

        Raises:
            SMPError: a parameter of the model has the same memory, and calls that are recorded use it later.
        """
        if self._parameters is None:
            placement = self.recorder.placement
            live = ((name, placement.parameter(name)) for name in placement.parameter_stage)
            self._parameters = {storage_of(each): name for name, each in live if not is_away(each)}
        memory = storage_of(target)
        name = None if memory is None else self._parameters.get(memory)
        if name is not None:
            raise SMPError(
                f"a tensor of shape {tuple(target.shape)} is changed in place inside an smp.step, and lies "
                f"in the memory of the parameter {name!r} (its .data, a view, made before the step), while "
                "calls that are recorded use that later: change it between steps, or by the parameter "
                "itself, as its module has it"
            )

    def refuse_saved(self, target: torch.Tensor) -> None:
        """A buffer is about to change without autograd's notice.

        Raises:
            SMPError: a backward of this microbatch reads it, or one of this step that has no copy of it.
        """
        if storage_of(target) in self._copied | self._saved:
            raise _changed_unheard(target)

    def before_backward(self) -> None:
        """``model.backward()`` is called: in one process it reads what was saved as it is by now.

        Raises:
            SMPError: something has changed, and autograd has not noticed: there it would compute with the
                new numbers, here it has a copy of the old ones.
        """
        for tensor, version, copy in self._kept:
            with torch._C.DisableTorchFunction():
                is_changed = version_of(tensor) == version and digest_of(tensor) != digest_of(copy)
            if is_changed:
                raise _changed_unheard(tensor)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What an ordinary tensor is a part of, if autograd knows, and a copy of that has the same part at the
    same place; None: it is taken for itself."""
    with torch._C.DisableTorchFunction():
        base = tensor._base if tensor._is_view() else None
        if base is None or type(base) is not torch.Tensor or base.layout is not torch.strided:
            return None
        same_kind = base.dtype is tensor.dtype and base.is_conj() == tensor.is_conj()
        if not same_kind or base.is_neg() != tensor.is_neg():
            return None
        return base if torch.empty_like(base, device="meta").stride() == base.stride() else None


def _changed_unheard(tensor: torch.Tensor) -> SMPError:
    return SMPError(
        f"a tensor of shape {tuple(tensor.shape)} was changed by way of .data or numpy, or by a batch norm "
        "whose statistics it is, after a call had read it, whose backward may read it again: in one process "
        "that would silently give another gradient. Change it with a torch function (x.mul_), which autograd "
        "notices, or give the call a clone()"
    )


def _requires_grad(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # no call of the user's
        return tensor.requires_grad
