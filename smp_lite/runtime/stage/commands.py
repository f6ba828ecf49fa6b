"""Runs recorded commands on real tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...errors import SMPError
from ...plan.step.segments import Segment
from ...record.backward.engine import edge_of
from ...record.backward.gradient_reads import parameter_reads
from ...record.backward.saved_state import unchanged, unchanged_parameter
from ...record.code.frames import users_line
from ...record.code.source_line import warn_once_at_user_line
from ...record.commands.apply_function import ApplyFunction
from ...record.commands.recording import Command, Recording
from ...record.describe.checkpointed_calls import seeded_by
from ...record.describe.effects import Buffers, Effects, NeedsOpening
from ...record.parameters.placement import Placement
from ...record.parameters.split_reads import SplitReads
from ...record.state.ambient import Ambient, with_users_modes
from ...record.state.draws import at_states, default_states
from ...record.state.places import in_force
from ...record.values.calls import NewTensor
from ...record.values.memory import storage_of
from ...record.values.placed import TensorMeta, has_attributes
from ...record.values.structure import LEAF, flatten
from ..sharded.parameters import ShardedParameters
from .random_streams import RandomStreams

_NO_SEEDS = _NO_GUARD = contextlib.nullcontext()


class CommandRunner:
    """Executes the commands of one segment after another."""

    def __init__(self, placement: Placement, streams: RandomStreams) -> None:
        self.placement = placement
        self.streams = streams
        self.undescribed: dict[int, RealRun] = {}  # by command
        self.copied: dict[int, Any] = {}  # values that the segment's calls got copies of: where those begin
        # Where gradients of others come in, if not at the value itself; and the edges there, which are taken
        # before anything changes in place.
        self.starts: dict[int, torch.Tensor] = {}
        self.edges: dict[int, Any] = {}
        self.doing = ""  # the command that runs, for errors
        self.observer: Any = None
        self.sharded: ShardedParameters | None = None

    def run_segment(
        self,
        recording: Recording,
        segment: Segment,
        local: dict[int, torch.Tensor],
        made: Mapping[int, torch.Tensor],
    ) -> None:
        """Runs the segment's commands.

        Args:
            local: maps the segment's imports, and then all its values, to tensors.
            made: the same tensors as they were made, where that was on this stage.
        """
        ambient = Ambient.current()
        self.copied.clear()
        self.starts.clear()
        self.edges.clear()
        recorded, is_same = None, False
        for index in segment.commands:
            command = recording.commands[index]
            if segment.late_uses:
                self._begin_before(index, segment, local)
            self.doing = command.label
            if command.ambient is not recorded:
                recorded = command.ambient
                is_same = recorded.same_state(ambient)
            if is_same:
                self._run(recording, command, local, segment, made)
            else:
                with command.ambient.entered():
                    self._run(recording, command, local, segment, made)
        self.doing = ""

    def _run(
        self,
        recording: Recording,
        command: Command,
        local: dict[int, torch.Tensor],
        segment: Segment,
        made: Mapping[int, torch.Tensor],
    ) -> None:
        if command.parameter is not None:
            (value,) = command.outputs
            local[value] = self.placement.parameter(command.parameter)
            # Here is where autograd comes to this use. While it is being recorded nobody knows which ones
            # gradients will come back of.
            if value in segment.gradient_exports or not recording.complete:
                self._begin_here(value, local)
            return
        if command.input is not None:
            local[command.outputs[0]] = command.input.detach().requires_grad_()
            return
        if command.on_made:
            local = {**local, **{source: made[source] for source in command.sources if source in made}}
        changed = self._before_changes(recording, command, local, segment) if command.changes else {}
        tensors = [
            tensor if source < 0 else changed.get(source, local[source])
            for tensor, source in zip(command.arguments.tensors, command.sources, strict=True)
        ]
        if command.meta is None:
            # Copies: whether the call changes its arguments in place is not known yet.
            copies = {s: t.clone() for t, s in zip(tensors, command.sources) if s >= 0}
            tensors = [copies.get(s, t) for t, s in zip(tensors, command.sources)]
            self.copied.update({s: edge_of(t) for s, t in copies.items() if t.requires_grad})
        args, kwargs = command.arguments.build(tensors)
        m = recording.microbatch_index
        if command.seed_key is not None:
            self.streams.seed(m, command.seed_key)
        seeding = seeded_by(self.streams.seeding(m, command.seeds)) if command.seeds else _NO_SEEDS
        watched = self.observer is not None and command.module is not None
        is_guarded = command.looks_at_gradients and (recording.backwards or not recording.complete)
        guard = parameter_reads(self._refuse_read) if is_guarded else _NO_GUARD
        if self.placement.split and command.module is not None:
            reads = SplitReads(self.placement.split_name)
        else:
            reads = _NO_GUARD
        if command.meta is None:
            seen = self.observer.before(command, args, kwargs) if watched else None
            with seeding, guard, reads:
                run = self.undescribed[command.index] = _run_for_real(command, tensors, args, kwargs)
            if watched and run.effect is None:
                self.observer.ran(m, command, *seen, run.result)
            return
        if watched:
            with in_force(command.carried or ()):
                seen = self.observer.before(command, args, kwargs)
        with seeding, guard, reads:
            result = _call(command, args, kwargs)
        if watched:
            self.observer.ran(m, command, *seen, result)
        self._store(command, result, local)
        for old, new in command.changes:
            local[new] = changed[old]

    def _begin_before(self, index: int, segment: Segment, local: Mapping[int, torch.Tensor]) -> None:
        """Autograd comes to its nodes in reverse: to this one after what the command makes of the value."""
        for command, value in segment.late_uses:
            if command == index:
                self._begin_here(value, local)

    def _begin_here(self, value: int, local: Mapping[int, torch.Tensor]) -> None:
        if local[value].requires_grad:
            with torch.enable_grad():
                self.starts[value] = start = torch.ops.aten.alias.default(local[value])
            self.edges[value] = edge_of(start)

    def _refuse_read(self, tensor: Any) -> None:
        """Code of a module looks at a gradient while it runs forward."""
        name = self.placement.alias(tensor)
        if name is not None:
            raise SMPError(
                f"the gradient of the parameter {name!r} is read or set at {users_line()}, in a forward "
                "inside an smp.step: backwards of earlier microbatches have not come there yet as they have "
                "in one process. Look at gradients between steps, or set microbatches to 1"
            )

    def _before_changes(
        self,
        recording: Recording,
        command: Command,
        local: dict[int, torch.Tensor],
        segment: Segment,
    ) -> dict[int, torch.Tensor]:
        """For each value that changes in place, the tensor to change.

        A cut value is copied first: its memory belongs to whoever made it, unless it is a parameter's, which
        is what changes. A value that others still want as it was is copied for them; the original changes,
        together with the views of it.
        """
        changed: dict[int, torch.Tensor] = {}
        cut, wanted = frozenset(segment.imports), frozenset((*segment.exports, *segment.roots))
        self._copy_forgotten(recording, command, local, cut, wanted)
        for old, _ in command.changes:
            tensor = local[old]
            if self.sharded is not None and self.sharded.owns_memory_of(tensor):
                raise SMPError(
                    f"{command.label} changes a parameter in place that is sharded over replicas, inside an "
                    "smp.step, where it is a gathered copy: change it when the step has returned"
                )
            if old in cut and not self.placement.owns_memory_of(tensor):
                if command.changes_views:
                    raise SMPError(
                        f"{command.label} changes a tensor in place of which a view was made on another "
                        "stage, or before a value was fetched: clone() the tensor before changing it"
                    )
                changed[old] = _copied_view(tensor) if command.hides_base else _copied(tensor)
                continue
            changed[old] = tensor
            if old in wanted or not recording.complete:
                local[old] = _copied(tensor)
        return changed

    def _copy_forgotten(
        self,
        recording: Recording,
        command: Command,
        local: dict[int, torch.Tensor],
        cut: frozenset[int],
        wanted: frozenset[int],
    ) -> None:
        """Views that Python has let go of are no versions of what changes, but others may still want them."""
        olds = [old for old, _ in command.changes]
        memories = {memory for old in olds if (memory := storage_of(local[old])) is not None}
        for value, tensor in list(local.items()):
            if value in olds or storage_of(tensor) not in memories:
                continue
            if value in cut and not self.placement.owns_memory_of(tensor):
                if command.changes_views:  # its memory belongs to whoever made it
                    raise SMPError(
                        f"{command.label} changes a tensor in place that is a view of what another stage, or "
                        "an earlier part of the step, has made: clone() the tensor before changing it"
                    )
                for old in olds:
                    if storage_of(local[old]) == storage_of(tensor):
                        local[old] = _copied(local[old])
            elif value in wanted or not recording.complete:
                local[value] = _copied(tensor)

    @staticmethod
    def _store(command: Command, result: Any, local: dict[int, torch.Tensor]) -> None:
        """Puts the result's new tensors under their values."""
        meta = command.meta
        assert meta is not None
        if meta.spec is LEAF:
            if type(meta.leaves[0]) is NewTensor:
                local[command.outputs[0]] = _checked(command, result, meta.leaves[0])
            return
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        if spec != meta.spec:
            raise _changed(command, "another structure")
        outputs = iter(command.outputs)
        for leaf, described in zip(leaves, meta.leaves, strict=True):
            if type(described) is NewTensor:
                local[next(outputs)] = _checked(command, leaf, described)

    def adopt(self, command: Command, local: dict[int, torch.Tensor]) -> None:
        """Stores the result of a command that was described only after it had run."""
        run = self.undescribed.pop(command.index)
        self._store(command, run.result, local)
        for old, new in command.changes:
            local[new] = run.tensors[command.sources.index(old)]


@dataclass
class RealRun:
    """What the run of a command that was not described has shown.

    Attributes:
        tensors: what it was given.
        result: what it returned.
        drew: whether it drew random numbers.
        buffers: of its module, those that it changed.
        states: where the generators went that it drew from.
        effect: what else it would have left behind, if anything; then all of it has been undone.
    """

    tensors: list[torch.Tensor]
    result: Any
    drew: bool
    buffers: tuple[str, ...] = ()
    states: tuple[torch.Tensor, ...] = ()
    effect: str | None = None


def _run_for_real(
    command: Command, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RealRun:
    """Runs a command that was not described, and looks at what it does beside returning a result."""
    module = command.module
    before = default_states()
    try:
        effects = Effects(module, args, kwargs) if module is not None else None
    except NeedsOpening as reason:
        return RealRun(tensors, None, False, effect=str(reason))
    if effects is None or module is None:
        return _run_function(command, tensors, args, kwargs)
    buffers = Buffers(module)
    result, found, changed = None, None, ()
    try:
        with effects.watched():
            result = _call(command, args, kwargs)
    except NeedsOpening as reason:
        found = str(reason)
    drew = any(not torch.equal(a, b) for a, b in zip(before, default_states(), strict=True))
    found = found or effects.found()
    if any(tensor._backward_hooks for tensor, source in zip(tensors, command.sources) if source >= 0):
        found = "puts a hook on the gradient of what it is given"
    leaves: list[Any] = []
    flatten((result, tensors), leaves)
    if any(isinstance(leaf, torch.Tensor) and has_attributes(leaf) for leaf in leaves):
        found = "sets attributes of tensors"
    if found is None:
        try:
            changed = buffers.changed()
        except NeedsOpening as reason:
            found = str(reason)
    if found is not None:
        effects.undo()
        buffers.restore()
        return RealRun(tensors, None, drew, effect=found)
    return RealRun(tensors, result, drew, changed)


def _run_function(
    command: Command, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RealRun:
    assert command.function is not None and command.draw is not None
    before = command.draw.states
    with at_states(before):
        result = command.function(*args, **kwargs)
        after = tuple(generator.get_state() for generator, _ in before)
    drew = any(not torch.equal(a, b) for (_, a), b in zip(before, after, strict=True))
    return RealRun(tensors, result, drew, states=after if drew else ())


def _call(command: Command, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call itself, in the Python state that it was recorded under."""
    call: Any = command.function
    if (module := command.module) is not None:
        # Recorded was torch's __call__; that of a class's own, around it, ran when it was recorded.
        is_torchs = type(module).__call__ is nn.Module.__call__ or not isinstance(module, nn.Module)
        call = module if is_torchs else partial(nn.Module.__call__, module)
    # Modes of the user's have seen torch's functions when they were recorded. Code of theirs runs now.
    is_users = command.module is not None or type(command.function) is ApplyFunction
    if not command.carried and not command.bare and command.draw is None and not command.must_stay:
        if not is_users:
            return call(*args, **kwargs)
        with with_users_modes():
            return call(*args, **kwargs)
    with contextlib.ExitStack() as stack:
        if is_users:
            stack.enter_context(with_users_modes())
        if command.carried:
            stack.enter_context(in_force(command.carried))
        if command.must_stay and command.module is not None:
            stack.enter_context(unchanged(command.label, command.module, command.must_stay))
        elif command.must_stay:
            target = args[0] if args else kwargs["out"]
            stack.enter_context(unchanged_parameter(command.label, command.must_stay[0], target))
        if command.bare:
            assert command.module is not None
            stack.enter_context(without_forward_hooks(command.module))
        if command.draw is not None:
            stack.enter_context(at_states(command.draw.states))
        return call(*args, **kwargs)


@contextlib.contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Within: the module's forward hooks, and those for all modules, are off."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    )
    kept = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, own in zip(hooks, kept, strict=True):
            table.update(own)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same gradient, though what changes it may stand under ``no_grad()``."""
    with torch.enable_grad():
        return tensor.clone()


def _copied_view(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is a view, as what it stands for: in autograd the base of that changes, and the gradient of
    the change is laid out like the base."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    with torch.enable_grad():
        base = tensor.permute(order).clone(memory_format=torch.contiguous_format)
        return base.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _checked(command: Command, tensor: Any, described: NewTensor) -> torch.Tensor:
    """The tensor, if it is as it was recorded."""
    meta = described.meta
    if not isinstance(tensor, torch.Tensor):
        raise _changed(command, f"a {type(tensor).__name__}")
    if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
        raise _changed(
            command,
            f"{tensor.dtype}{list(tensor.shape)} instead of {meta.dtype}{list(meta.shape)}",
        )
    if tensor.layout is torch.strided and tensor.stride() != meta.stride and described.aliases is None:
        return _laid_out(command, tensor, meta)
    return tensor


def _laid_out(command: Command, tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor with the strides that it was recorded with.

    A kernel may lay its result out otherwise than it says of fake tensors; what was recorded after it (a
    view, a ``contiguous()`` that had nothing to do) counts on what it said. One process goes on with what the
    kernel made, so it may get other last bits: that is said.
    """
    pairs = zip(meta.shape, tensor.stride(), meta.stride, strict=True)
    if not meta.stride or all(length < 2 or real == said for length, real, said in pairs):
        return tensor
    warn_once_at_user_line(
        f"{command.label} lays out its result in memory otherwise than torch says of tensors without data: "
        f"it is copied from strides {tuple(tensor.stride())} to {tuple(meta.stride)}, and what follows may "
        "differ from one process in the last bits. contiguous() after it makes both the same"
    )
    with torch.no_grad():
        empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return empty.copy_(tensor)


def _changed(command: Command, what: str) -> SMPError:
    return SMPError(
        f"{command.label} returned {what}, other than it was recorded with: the form of its result must not "
        "depend on anything but its inputs and attributes, and under static_mode True, where the step "
        "function is not run again, on nothing but the forms of its inputs: set that to False"
    )
