"""Calls that repeat those of an earlier microbatch.

Microbatches mostly do the same, so the next call is mostly known: the one that stands at this place of the
last microbatch that was recorded in full. If everything is as it was then that its command was made of, the
command is written again as it was, and nobody asks anew what it returns, where it runs and what its code
reads:

- the calls before it: both digests of the recording are what they were;
- what is called, with which values and plain arguments, and the form of ordinary tensors among them;
- the torch state around it;
- of a module: its signature, its hooks and what its code reads elsewhere.

Only calls are known that leave nothing behind but their results. All others, and all that differ in anything,
are recorded in full, and known from then on. It is the same command either way: this is a shorter way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..backward.checkpoints import is_inside_reentrant
from ..commands.apply_function import ApplyFunction
from ..commands.binding import is_detached
from ..commands.recording import Command, Value
from ..describe.checkpointed_calls import CheckpointedRun
from ..describe.descriptions import Description
from ..describe.signature import tensor_meta
from ..state.ambient import Ambient
from ..state.places import PlacesRead, Seen
from ..values.calls import Arguments, NewTensor
from ..values.placed import NUM_OWN, PlacedTensor, TensorMeta
from ..values.structure import LEAF, Spec, flatten, is_flat

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["RepeatedCalls"]

_Digests = tuple[int, int]
_EXACT = frozenset(
    (bool, int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
)
"""Kinds of plain values of which equal ones are the same; 0.0 and -0.0 are not."""
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NO_ARGUMENTS = Arguments([], None)


class _Leaf(NamedTuple):
    """One argument: of a placed tensor its value and form, of an ordinary one its form, else the value."""

    kind: type
    value: Any
    meta: TensorMeta | None


@dataclass(slots=True)
class _Known:
    """One call as it was recorded, and what there was before and after it."""

    what: Callable[..., Any]
    command: Command
    """As it was written first; without tensors."""
    leaves: list[_Leaf]
    spec: Spec
    is_flat: bool
    has_ordinary: bool
    before: _Digests
    after: _Digests
    links: tuple[tuple[int, ...], ...]
    home: int | None
    only: Value | None
    """Of a call that returns one new tensor and gets no ordinary one; its commands share their arguments."""
    viewed: int | None
    """Which of the leaves ``only`` is a view of."""
    is_detached: bool
    signature: int = -1
    places: PlacesRead | None = None
    seen: Seen | None = None
    functions: Collection[Any] = ()
    """What the module's code calls, which may be found to be more; ``num_functions`` were known."""
    num_functions: int = 0


_Found = tuple[_Known, Sequence[Any], Spec]
"""A known call, and what it is called with this time."""


class RepeatedCalls:
    """The calls of a recorder's last microbatches, by their place among the commands."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._known: list[_Known | None] = []

    def forget(self) -> None:
        """What modules are, or where they lie, has changed."""
        self._known.clear()

    def find(self, what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found | None:
        """The known call that this one repeats, as far as its arguments tell; None: there is none."""
        recorder = self.recorder
        recording = recorder.recording
        assert recording is not None
        index = len(recording.commands)
        if index >= len(self._known):
            return None
        known = self._known[index]
        if (
            known is None
            or known.what is not what
            or known.before != (recording.digest, recording.structure_digest)
            or known.command.epoch != recording.epoch
            or (known.only is not None and known.only.index != len(recording.values))
            or recorder.modules.home != known.home
            or recorder.ordinary.twins.by_id
            or recorder.buffers.rebound
            or recorder.buffers.num_stateful
            or recorder.tape is not None
            or _saved_tensors_hooks(True) is not None
            or is_inside_reentrant()
            or Ambient.current() is not known.command.ambient
        ):
            return None
        leaves: Any = args
        spec = known.spec
        if kwargs or not known.is_flat:
            leaves = []
            spec = flatten((args, kwargs), leaves)
            if spec != known.spec:
                return None
        if len(leaves) != len(known.leaves):
            return None
        serial = recorder.serial
        for leaf, (kind, value, meta) in zip(leaves, known.leaves):
            if type(leaf) is not kind:
                return None
            if kind is PlacedTensor:
                own = leaf.__dict__
                if (
                    own.get("smp_value") != value
                    or own.get("smp_microbatch") != serial
                    or own.get("smp_recorder") is not recorder
                    or (own["smp_meta"] is not meta and own["smp_meta"] != meta)
                    or len(own) != NUM_OWN
                ):
                    return None
            elif kind is torch.Tensor:
                if leaf.__dict__ or recorder.buffers.seen.stale or tensor_meta(leaf) != meta:
                    return None
            elif leaf is not value and (kind not in _EXACT or leaf != value):
                return None
        return known, leaves, spec

    def is_unchanged(self, known: _Known, module: nn.Module) -> bool:
        """Whether a module that is called again is what it was, and its code reads what it read."""
        return (
            self.recorder.descriptions.signatures.of(module) == known.signature
            and len(known.functions) == known.num_functions
            and self.recorder.num_modes == known.command.ambient.num_modes
            and (known.places is None or known.places.look() is known.seen)
        )

    def write(self, found: _Found, module: nn.Module | None = None) -> Any:
        """Adds the command once more; returns its result."""
        known, leaves, spec = found
        recorder = self.recorder
        recording = recorder.recording
        assert recording is not None
        template = known.command
        meta = template.meta
        assert meta is not None
        returned: Any
        if known.only is not None:
            command = template.again(template.arguments)
            command.outputs = (known.only.index,)
            base = None if known.viewed is None else leaves[known.viewed]
            place_again = recorder.writer.binder.place_again
            returned = place_again(known.only, base, detached=known.is_detached)
            recording.links.append(known.links)
        else:
            command = template.again(Arguments(list(leaves), spec))
            given = list(command.arguments.tensors)
            if known.has_ordinary:
                recorder.ordinary.capture(command.arguments, command.sources, meta.saved_arguments)
            returned, links = recorder.writer.bind(command, meta, given)
            recording.links.append(links)
        recording.commands.append(command)
        recording.digest, recording.structure_digest = known.after
        if module is not None:
            if meta.draws:
                recording.draws = True
                command.seed_key = recorder.writer.seed_key(template.label)
            if meta.saved_state:
                recorder.saved_state.note(module, meta, recording)
            recorder.modules.note(command, known.places)
        return returned

    def leaves_of(self, command: Command) -> list[_Leaf] | None:
        """The arguments of a command that is about to be bound, to know them again; None: they cannot be."""
        leaves = []
        serial = self.recorder.serial
        sources = iter(command.sources)
        for leaf in command.arguments.leaves:
            kind = type(leaf)
            if isinstance(leaf, torch.Tensor):
                source = next(sources)
                if kind is PlacedTensor:
                    if len(leaf.__dict__) != NUM_OWN or leaf.smp_microbatch != serial:
                        return None
                    leaves.append(_Leaf(kind, source, leaf.smp_meta))
                elif kind is torch.Tensor:
                    leaves.append(_Leaf(kind, None, tensor_meta(leaf)))
                else:
                    return None
            elif kind in _EXACT or kind is float:
                leaves.append(_Leaf(kind, leaf, None))
            else:
                return None
        return leaves

    def learn(
        self, command: Command, described: Description, leaves: list[_Leaf] | None, before: _Digests
    ) -> None:
        """A command has just been recorded in full; ``leaves`` and ``before`` are from before it."""
        recorder = self.recorder
        recording = recorder.recording
        assert recording is not None
        self._known += [None] * (command.index + 1 - len(self._known))
        self._known[command.index] = None
        what = command.module if command.module is not None else command.function
        meta = described.meta
        if (
            leaves is None
            or what is None
            or meta.changed
            or meta.buffers
            or meta.unguarded
            or meta.sets_attributes
            or command.draw is not None
            or command.bare
            or command.on_made
            or command.touches
            or command.must_stay
            or command.seeds
            or type(what) in (ApplyFunction, CheckpointedRun)
        ):
            return
        has_ordinary = any(leaf.kind is torch.Tensor for leaf in leaves)
        only = meta.leaves[0] if meta.spec is LEAF else None
        is_shared = not has_ordinary and type(only) is NewTensor
        is_view = type(only) is NewTensor and only.aliases is not None
        known = self._known[command.index] = _Known(
            what=what,
            command=command.again(command.arguments if is_shared else _NO_ARGUMENTS),
            leaves=leaves,
            spec=command.arguments.spec,
            is_flat=is_flat(command.arguments.spec, len(leaves)),
            has_ordinary=has_ordinary,
            before=before,
            after=(recording.digest, recording.structure_digest),
            links=recording.links[-1],
            home=recorder.modules.home,
            only=recording.values[command.outputs[0]] if is_shared else None,
            viewed=command.arguments.positions[only.aliases] if is_view else None,
            is_detached=is_view and is_detached(command, only),
        )
        if command.module is not None:
            descriptions = recorder.descriptions
            known.signature = descriptions.signatures.of(command.module)
            known.places = descriptions.places_of(command.module, known.signature)
            if known.places is not None:
                known.seen = known.places.seen
                known.functions = descriptions.functions_of(known.signature)
                known.num_functions = len(known.functions)
