"""Turns the description of a call's result into placed values.

A placed tensor stands for a *value*, one version of it: a change in place gives it, and the views that share
its memory, new versions. So what was recorded before still reads the old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import SMPError
from ..values.calls import ChangedArgument, Constant, NewTensor, Repeated, ResultMeta, SameTensor
from ..values.placed import Listener, PlacedTensor
from ..values.structure import LEAF, rebuild
from ..values.torch_functions import DETACHES
from .recording import Command, Recording, Value

Links = tuple[tuple[int, ...], ...]


class Binder:
    """Makes the placed values of one microbatch.

    Args:
        recording: where their values are numbered.
        listener: hears of what is done with them.
        serial: number of the microbatch over all steps.
    """

    def __init__(
        self, recording: Recording, listener: Listener, serial: int, made: list[weakref.ref[PlacedTensor]]
    ) -> None:
        self.recording = recording
        self.listener = listener
        self.serial = serial
        self.made = made

    def bind(self, command: Command, meta: ResultMeta, given: Sequence[Any]) -> tuple[Any, Links]:
        """Completes the command; returns its result and, for each output, the values it depends on.

        Args:
            command: has been made.
            meta: what it returns and changes.
            given: its tensor arguments as they were given, of which the command may have copies.
        """
        if meta.spec is LEAF and not meta.changed and type(only := meta.leaves[0]) is NewTensor:
            return self._bind_one(command, meta, only, given)
        tensors, sources = command.arguments.tensors, command.sources
        outputs: list[int] = []
        links: list[tuple[int, ...]] = []
        new: list[PlacedTensor] = []
        leaves: list[Any] = []
        for leaf in meta.leaves:
            if type(leaf) is NewTensor:
                placed = self._place(leaf, command, given)
                outputs.append(placed.smp_value)
                links.append(tuple([sources[i] for i in leaf.links if sources[i] >= 0]))
                new.append(placed)
                if leaf.shares is not None:
                    _note_shared(placed, new[leaf.shares], is_base=not leaf.is_view)
                leaves.append(placed)
            elif type(leaf) is SameTensor:
                leaves.append(tensors[leaf.argument])
            elif type(leaf) is Repeated:
                leaves.append(new[leaf.index])
            else:
                assert type(leaf) is Constant
                leaves.append(leaf.value)
        changes: dict[int, int] = {}
        for changed in meta.changed:
            for old, version, reached in self._change(command, changed, changes, new):
                changes[old] = version
                outputs.append(version)
                links.append(reached)
        command.meta = meta
        command.outputs = tuple(outputs)
        command.changes = tuple(changes.items())
        if meta.draws and command.module is not None:
            self.recording.draws = True
        return rebuild(meta.spec, iter(leaves)), tuple(links)

    def _bind_one(
        self, command: Command, meta: ResultMeta, leaf: NewTensor, given: Sequence[Any]
    ) -> tuple[Any, Links]:
        """The same for a call that returns one new tensor, as most do."""
        sources = command.sources
        placed = self._place(leaf, command, given)
        command.meta = meta
        command.outputs = (placed.smp_value,)
        if meta.draws and command.module is not None:
            self.recording.draws = True
        return placed, (tuple([sources[i] for i in leaf.links if sources[i] >= 0]),)

    def _place(self, leaf: NewTensor, command: Command, given: Sequence[Any]) -> PlacedTensor:
        """A placed tensor for a new value, which may share the memory of one of the call's arguments."""
        meta, stage_index = leaf.meta, command.stage_index
        if len(meta.stride) != len(meta.shape):
            raise SMPError(
                f"{command.label} returns a sparse or nested tensor, which cannot go from one module to "
                "another: make and use it within one module, or return to_dense() or to_padded_tensor(0.0)"
            )
        viewed = given[leaf.aliases] if leaf.aliases is not None else None
        value = self.recording.new_value(
            stage_index, meta, is_view=leaf.is_view, lies_in=self._memory_of(leaf, viewed)
        )
        placed = PlacedTensor.of_value(meta, self.listener, stage_index, self.serial, value)
        self.made.append(weakref.ref(placed))
        if type(viewed) is PlacedTensor:
            _note_view(placed, viewed, is_detached(command, leaf))
        elif viewed is not None:
            placed.smp_aliases = [(weakref.ref(placed), 0)]
            self.listener.viewed(viewed, placed.smp_aliases)
        return placed

    def _memory_of(self, leaf: NewTensor, viewed: Any) -> str:
        """What a new value lies in the memory of, but for other values and parameters."""
        if leaf.is_buffer:
            return "a buffer that a module has returned, which other microbatches use too"
        if type(viewed) is PlacedTensor:
            return "" if viewed.smp_parameter is not None else self.recording.values[viewed.smp_value].lies_in
        return "" if viewed is None else "a view of a tensor that every rank has of its own"

    def place_again(self, value: Value, base: Any, *, detached: bool) -> PlacedTensor:
        """The same for the value that an earlier microbatch has made at this place.

        Args:
            base: what it is a view of, if anything.
            detached: see :func:`is_detached`.
        """
        assert value.index == len(self.recording.values)
        self.recording.values.append(value)
        placed = PlacedTensor.of_value(value.meta, self.listener, value.stage_index, self.serial, value.index)
        self.made.append(weakref.ref(placed))
        if base is not None:
            _note_view(placed, base, detached)
        return placed

    def _change(
        self,
        command: Command,
        changed: ChangedArgument,
        known: dict[int, int],
        results: Sequence[PlacedTensor],
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """A placed argument was changed in place: (old version, new version, what that depends on).

        Views among the ``results`` of the very call are described as they are after the change.
        """
        target = command.arguments.tensors[changed.argument]
        if type(target) is not PlacedTensor:
            raise SMPError(
                f"{command.label} changes one of its arguments in place, an ordinary tensor that every "
                "rank holds, depending on data: pass a copy (tensor.clone())"
            )
        if target.smp_parameter is not None:
            return []  # the owner's parameter itself changes; it has no versions
        if lies_in := self.recording.values[target.smp_value].lies_in:
            raise SMPError(
                f"{command.label} changes {lies_in}, in place: change a clone() of it, or a buffer in its "
                "module's own code"
            )
        if changed.meta.shape != target.smp_meta.shape:
            raise SMPError(f"{command.label} changes the shape of a tensor in place: use its plain form")
        reached = tuple(command.sources[i] for i in changed.links if command.sources[i] >= 0)
        found = []
        values = self.recording.values
        family, base = family_of(target), _base(target)
        command.hides_base |= base is None or values[base.smp_value].is_view
        of_base = None if base is None else base.smp_value
        if of_base is not None:  # autograd hangs the change, and the views anew, under what they are views of
            reached = tuple([of_base if value == target.smp_value else value for value in reached])
        for member in sharing_memory(target):
            if member.smp_parameter is not None:
                continue
            old = member.smp_value
            if old in known or any(member is result for result in results):
                continue
            links: tuple[int, ...] = ()
            if family_of(member) == family:
                member.smp_meta = member.smp_meta._replace(requires_grad=changed.meta.requires_grad)
                with torch._C.DisableTorchFunction():
                    member.requires_grad_(changed.meta.requires_grad)
                links = reached
            member.smp_stage = command.stage_index
            member.smp_value = self.recording.new_value(
                command.stage_index, member.smp_meta, is_view=values[old].is_view
            )
            earlier = of_base if of_base is not None and family_of(member) == family else old
            # A buffer of zeros gets no gradient, even if what was written into it does.
            before = (earlier,) if values[earlier].meta.requires_grad else ()
            found.append((old, member.smp_value, tuple(dict.fromkeys((*links, *before)))))
        command.changes_views |= len(found) > 1
        return found


def is_detached(command: Command, leaf: NewTensor) -> bool:
    """Whether a view is one through which no gradient flows, so that what is written into it has none for
    those that share its memory: of ``detach()``, ``.data`` or under ``no_grad()``."""
    assert leaf.aliases is not None
    function, viewed = command.function, command.arguments.tensors[leaf.aliases]
    return (
        not command.ambient.grad
        or getattr(function, "__name__", "") in DETACHES
        or getattr(function, "__self__", None) is torch.Tensor.data
        or (type(viewed) is PlacedTensor and viewed.smp_meta.requires_grad and not leaf.meta.requires_grad)
    )


def _note_view(placed: PlacedTensor, base: PlacedTensor, detached: bool) -> None:
    if base.smp_aliases is None:
        base.smp_aliases = [(weakref.ref(base), 0)]
    aliases = placed.smp_aliases = base.smp_aliases
    family = 1 + max(other for _, other in aliases) if detached else family_of(base)
    aliases.append((weakref.ref(placed), family))


def _note_shared(placed: PlacedTensor, other: PlacedTensor, *, is_base: bool) -> None:
    """Two results of one call share memory; of them all the base comes first."""
    _note_view(placed, other, placed.smp_meta.requires_grad != other.smp_meta.requires_grad)
    if is_base:
        assert placed.smp_aliases is not None
        placed.smp_aliases.insert(0, placed.smp_aliases.pop())


def family_of(placed: PlacedTensor) -> int:
    """Those that share a gradient too, among the tensors that share memory."""
    return next((family for reference, family in placed.smp_aliases or () if reference() is placed), 0)


def _base(placed: PlacedTensor) -> PlacedTensor | None:
    """What it is a view of, as far as gradients go, or itself; None: nobody holds that any more."""
    if placed.smp_aliases is None:
        return placed
    family = family_of(placed)
    base = next(reference() for reference, other in placed.smp_aliases if other == family)
    return base if base is None or base.smp_parameter is None else placed


def sharing_memory(placed: PlacedTensor) -> list[PlacedTensor]:
    """The placed tensors that share its memory, itself included, and that somebody still holds."""
    if placed.smp_aliases is None:
        return [placed]
    members = [reference() for reference, _ in placed.smp_aliases]
    return [member for member in members if member is not None]
