"""``static_mode``: a step that is recorded once and from then on replayed with other inputs.

The commands hold ordinary tensors that the step function and the model's own code have made: masks, shifted
targets, one-hot rows. :class:`Tape` notes while recording every torch function that is called on ordinary
tensors, or makes one, and calls them again for the next batch, each under the torch state that was around it;
nothing else of the user's code runs again. So whatever would have come out differently must not matter:

- Looking at the data of the batch, drawing random numbers, and carrying values from one microbatch to the
  next are errors under ``static_mode``.
- If a call gives a tensor of another form than it gave then (``x[mask]``), or other numbers that the code
  has looked at, the step is recorded anew, for this batch: Python may have asked for the shape.
- A tensor may come out of a place where no torch function is seen: ``torch.vmap``, ``torch.jit``, another
  thread, an earlier microbatch. It was not there before the step, and no noted call has made it. A step that
  uses one is never replayed; that is said once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SMPError
from ..describe.signature import tensor_meta
from ..state.ambient import FUNCTORCH, Ambient
from ..state.draws import default_states
from ..values.calls import Arguments
from ..values.memory import digest_of, storage_of, version_of
from ..values.placed import PlacedTensor, TensorMeta
from ..values.structure import exact_spec, flatten
from ..values.torch_functions import LOOKS_AT_DATA, SHARES_MEMORY, function_name
from .recording import Backward, Recording

__all__ = ["Differs", "Tape", "TensorsBefore", "given_objects", "refuse", "step_key"]


_OF_FOREIGN_MEMORY = frozenset(("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack"))
"""Functions whose result may lie in memory that is not torch's."""


def refuse(what: str) -> SMPError:
    """The error for what replaying cannot repeat."""
    return SMPError(
        f"static_mode: True, but the step function {what}, which a replayed step would not do again: "
        "set static_mode to False"
    )


class Differs(Exception):
    """Something comes out of a replay in another form than it was recorded with."""


class TensorsBefore:
    """The tensors that there are when a step begins to be recorded; all its tapes have the same.

    Attributes:
        bound: arguments of commands, by identity and place, that tapes of earlier microbatches make anew.
    """

    def __init__(self) -> None:
        self.bound: set[tuple[int, int]] = set()
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        self._found = {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def forget(self) -> None:
        self._found.clear()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        reference = self._found.get(id(tensor))
        return reference is not None and reference() is tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """One call; tensors are numbered by their slots, and None where there is no tensor.

    Attributes:
        made: of each leaf of the result its form or, if it is no tensor, its value.
    """

    func: Callable[..., Any]
    arguments: Arguments
    sources: list[int]
    outputs: list[int | None]
    made: list[Any]
    ambient: Ambient

    def run(self, values: dict[int, Any]) -> None:
        """Calls it again, and stores what it makes."""
        args, kwargs = self.arguments.build([values[source] for source in self.sources])
        if self.ambient is Ambient.current():
            result = self.func(*args, **kwargs)
        else:
            with self.ambient.entered():
                result = self.func(*args, **kwargs)
        leaves: list[Any] = []
        flatten(result, leaves)
        if len(leaves) != len(self.made):
            raise Differs
        for slot, made, leaf in zip(self.outputs, self.made, leaves, strict=True):
            if _form(leaf) != made:
                raise Differs
            if slot is not None:
                values[slot] = leaf


@dataclass(frozen=True, slots=True)
class _Look:
    """Python has looked at the numbers of a tensor that does not depend on the batch."""

    source: int
    digest: int

    def run(self, values: dict[int, Any]) -> None:
        if _digest(values[self.source]) != self.digest:
            raise Differs


@dataclass(frozen=True, slots=True)
class _Copy:
    """Something of an earlier microbatch is about to change that a command of it has captured."""

    arguments: Arguments
    place: int

    def run(self, values: dict[int, Any]) -> None:
        with torch.no_grad():
            self.arguments.replace(self.place, self.arguments.tensors[self.place].clone())


_OWN_NUMBERS = "random numbers from a generator that it makes, seeds or forks"


class Tape:
    """The calls on ordinary tensors in one microbatch.

    Args:
        inputs: the leaves of the microbatch's arguments.
        before: the tensors that there were before the step.

    Attributes:
        unseen: names a tensor that was made where nothing is seen; None: there is none.
    """

    def __init__(self, inputs: list[Any], before: TensorsBefore) -> None:
        self.unseen: str | None = None
        self._before = before
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps recorded tensors alive, so that their ids stay theirs
        self._entries: list[_Call | _Look | _Copy] = []
        self._bindings: list[tuple[Arguments, int, int]] = []
        self._gradients: list[tuple[Backward, int, int]] = []
        self._outside: dict[int, torch.Tensor] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}  # of what was there before, as first seen
        self._changed: list[int] = []  # slots of what was there before and is changed in place
        self._of_batch: set[int] = set()
        self._known_versions: dict[int | None, int] = {}  # of memory, as noted calls have left it
        self._num_slots = len(inputs)
        for number, leaf in enumerate(inputs):
            if isinstance(leaf, torch.Tensor):
                self._slots.setdefault(id(leaf), number)
                self._kept.append(leaf)
                self._versions[number] = leaf, version_of(leaf)
                self._note_version(leaf)
                self._of_batch.add(number)

    def slot(self, tensor: object) -> int | None:
        return self._slots.get(id(tensor))

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an ordinary torch function and notes it."""
        ambient = Ambient.current()
        if ambient.num_modes >= FUNCTORCH:
            return func(*args, **kwargs)  # what comes out of the transformation is unseen
        arguments = Arguments.of(args, kwargs)
        sources = [self._source(tensor) for tensor in arguments.tensors]
        depends = any(source in self._of_batch for source in sources)
        name = getattr(func, "__name__", "")
        if (name in SHARES_MEMORY or name in _OF_FOREIGN_MEMORY) and self.unseen is None:
            self.unseen = "memory that others than torch may write to"
        if name in LOOKS_AT_DATA:
            if depends:
                raise refuse(f"looks at the data of its inputs ({function_name(func)}())")
            pairs = zip(sources, arguments.tensors, strict=True)
            self._entries += [_Look(source, _digest(tensor)) for source, tensor in pairs]
            return func(*args, **kwargs)
        versions = [version_of(tensor) for tensor in arguments.tensors]
        with torch._C.DisableTorchFunction():  # no call of the step's
            states = default_states()
        result = func(*args, **kwargs)
        if self.unseen is None and _draws(arguments, states):
            # Where a generator stands then (made anew, forked) is not for a replay to tell.
            self.unseen = _OWN_NUMBERS
        leaves: list[Any] = []
        flatten(result, leaves)
        outputs = [self._new_slot(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        changed = [
            source
            for source, tensor, version in zip(sources, arguments.tensors, versions, strict=True)
            if version_of(tensor) != version
        ]
        for tensor in (*arguments.tensors, *[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
            self._note_version(tensor)
        if depends:
            self._of_batch.update(changed, (slot for slot in outputs if slot is not None))
        if changed or result is None or any(output is not None for output in outputs):
            made = list(map(_form, leaves))
            self._entries.append(_Call(func, arguments, sources, outputs, made, ambient))
        return result

    def draws(self, arguments: Arguments) -> None:
        """A command is recorded that draws; if from torch's own generators, the step will be refused."""
        if self.unseen is None and any(isinstance(leaf, torch.Generator) for leaf in arguments.leaves):
            self.unseen = _OWN_NUMBERS

    def copied(self, arguments: Arguments, i: int) -> torch.Tensor:
        """A copy for a command, maybe of an earlier microbatch, of an argument that is about to change."""
        if (id(arguments), i) in self._before.bound:
            self._entries.append(_Copy(arguments, i))
            return arguments.tensors[i].clone()
        copy: torch.Tensor = self.call(torch.clone, (arguments.tensors[i],), {})
        self._bindings.append((arguments, i, self._slots[id(copy)]))
        return copy

    def _new_slot(self, tensor: torch.Tensor) -> int:
        found = self._slots.get(id(tensor))
        if found is None:
            found = self._slots[id(tensor)] = self._num_slots
            self._num_slots += 1
            self._kept.append(tensor)
            if tensor.is_nested and self.unseen is None:
                self.unseen = "a nested tensor, of which nobody can tell the form"
        return found

    def _note_version(self, tensor: torch.Tensor) -> None:
        """Changes of the tensor's memory are known up to here."""
        memory = storage_of(tensor)
        if memory is not None:
            self._known_versions[memory] = version_of(tensor)

    def _look_at_version(self, tensor: torch.Tensor) -> None:
        """Notes if the tensor has been changed where nothing is seen."""
        known = self._known_versions.get(storage_of(tensor))
        if known is not None and known != version_of(tensor) and self.unseen is None:
            self.unseen = f"a tensor of shape {list(tensor.shape)} that was changed"

    def _source(self, tensor: torch.Tensor) -> int:
        found = self._slots.get(id(tensor))
        self._look_at_version(tensor)
        if found is None:
            found = self._new_slot(tensor)
            self._outside[found] = tensor
            self._versions[found] = tensor, version_of(tensor)
            self._look_for(tensor)
        return found

    def _look_for(self, tensor: torch.Tensor) -> None:
        """Notes if the tensor, which no noted call has made, was not there before the step."""
        if tensor not in self._before and self.unseen is None:
            self.unseen = f"a tensor of shape {list(tensor.shape)}"

    def bind(self, recording: Recording, outputs: Sequence[Any]) -> None:
        """The microbatch has been recorded: finds what in it changes from batch to batch.

        Args:
            outputs: the leaves of its result.
        """
        for command in recording.commands:
            for i, source in enumerate(command.sources):
                if source < 0 and (slot := self._bound(command.arguments.tensors[i])) is not None:
                    self._bindings.append((command.arguments, i, slot))
        self._before.bound.update((id(arguments), i) for arguments, i, _ in self._bindings)
        for backward in recording.backwards:
            for i, gradient in enumerate(backward.gradients):
                if gradient is not None and (slot := self._bound(gradient)) is not None:
                    self._gradients.append((backward, i, slot))
        for leaf in outputs:
            if isinstance(leaf, torch.Tensor) and type(leaf) is not PlacedTensor:
                self._bound(leaf)
        for slot, (tensor, version) in self._versions.items():
            if version_of(tensor) != version:
                self._changed.append(slot)
        # From now on slots stand for what the batch and the calls have made.
        for entry in self._entries:
            for i, source in enumerate(entry.sources if type(entry) is _Call else ()):
                if source not in self._outside:
                    entry.arguments.replace(i, None)
        self._kept.clear()
        self._slots.clear()
        self._versions.clear()

    def _bound(self, tensor: torch.Tensor) -> int | None:
        """The slot of what a replay makes anew; None: it is the tensor itself."""
        slot = self._slots.get(id(tensor))
        if slot is None:
            self._look_for(tensor)
        self._look_at_version(tensor)
        return None if slot in self._outside else slot

    def forget_before(self) -> None:
        """The step has been recorded. (Nobody can swap a tensor that is weakly referred to.)"""
        self._before.forget()

    def changed(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The tensors from before the step that a replay changes in place."""
        return [self._outside[slot] if slot in self._outside else inputs[slot] for slot in self._changed]

    def replay(self, inputs: list[Any]) -> dict[int, Any]:
        """Puts the tensors made from these inputs into the commands; returns all slots.

        Raises:
            Differs: the step must be recorded.
        """
        values: dict[int, Any] = {**self._outside, **dict(enumerate(inputs))}
        for entry in self._entries:
            entry.run(values)
        for arguments, i, slot in self._bindings:
            arguments.replace(i, values[slot])
        for backward, i, slot in self._gradients:
            backward.gradients = (*backward.gradients[:i], values[slot], *backward.gradients[i + 1 :])
        return values


def _draws(arguments: Arguments, states: list[torch.Tensor]) -> bool:
    """Whether a call has been given a generator, or has moved torch's own on, which were at these states."""
    if any(isinstance(leaf, torch.Generator) for leaf in arguments.leaves):
        return True
    with torch._C.DisableTorchFunction():
        return any(not torch.equal(a, b) for a, b in zip(states, default_states(), strict=True))


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorMeta.of(leaf) if not leaf.is_nested else None


def _digest(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return digest_of(tensor.detach().cpu())


def step_key(inputs: list[Any]) -> tuple[tuple[Any, ...], list[list[Any]]]:
    """Steps with equal keys can be replayed for one another, as long as the :func:`given_objects` stay.

    Returns:
        The key, and the leaves of each microbatch's arguments.
    """
    all_leaves: list[list[Any]] = []
    key: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    places: dict[int, int] = {}
    for args, kwargs in inputs:
        leaves: list[Any] = []
        key.append(exact_spec(flatten((args, kwargs), leaves)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # Which of them are one tensor is part of it: the tape knows them by identity.
                key.append((places.setdefault(id(leaf), len(places)), tensor_meta(leaf)))
            else:
                key.append(_key_of(leaf))
        all_leaves.append(leaves)
    return tuple(key), all_leaves


def given_objects(inputs: list[Any]) -> list[Any]:
    """What among the arguments stands in a key by identity, and may change in place."""
    leaves: list[Any] = []
    flatten(inputs, leaves)
    found = {id(leaf): leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)}
    return [leaf for leaf in found.values() if type(leaf) not in _BY_VALUE]


def _key_of(leaf: Any) -> Hashable:
    kind = type(leaf)
    if kind is float or kind is complex:
        return kind, repr(leaf)  # 0.0 is not -0.0
    return (kind, leaf) if kind in _BY_VALUE else ("object", id(leaf))


_BY_VALUE = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
