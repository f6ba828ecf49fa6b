"""Which tensors are the model's parameters and gradients, whatever object a script has kept of them.

After partition a parameter is the object that it was before, here or away
(:mod:`smp_lite.record.parameters.away`). Only where somebody held weak references to it is there a new one,
and a list made before the first step still holds the former. All are told by identity, and numbered as in
the whole model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...record.parameters.away import is_away, root_of
from ...record.parameters.placement import Placement
from ...record.values.memory import place_of
from ...record.values.placed import PlacedTensor

if TYPE_CHECKING:
    from ...session import Session

__all__ = ["PARTIAL_KEY", "OwnParameters", "are_gradients", "check_mark", "partial_mark"]

PARTIAL_KEY = "_smp_is_partial"
"""Marks a state dict of one rank's own part: True, or of which pieces of sharded parameters it is."""


def partial_mark(session: Session) -> bool | str:
    """What marks this rank's own part."""
    if not session.shard_axes:
        return True
    axis = session.axis("+".join(session.shard_axes))
    return f"piece {axis.index} of {axis.size}"


def check_mark(session: Session, mark: object, caller: str) -> None:
    """Raises ValueError where a part is of other pieces than this rank holds."""
    own = partial_mark(session)
    if mark and mark != own:
        theirs, mine = ("whole parameters" if m is True else f"{m} of each parameter" for m in (mark, own))
        raise ValueError(
            f"{caller}: the part was saved with {theirs}, and this rank holds {mine}: load the whole "
            "state_dict(), or a portable checkpoint"
        )


class OwnParameters:
    """The parameters of a model that is about to be cut.

    Args:
        placement: of the model, before the parameters of other stages are freed.
        stages: that this process plays.

    Attributes:
        names: by number: the model's order, each parameter once.
        local: numbers of those that live here.
    """

    def __init__(self, placement: Placement, stages: frozenset[int]) -> None:
        self.names = list(placement.parameter_stage)
        self.local = [i for i, name in enumerate(self.names) if placement.parameter_stage[name] in stages]
        self._placement = placement
        self._numbers = {name: i for i, name in enumerate(self.names)}
        self._is_local = frozenset(self.local)
        self._before = [placement.parameter(name) for name in self.names]
        self._stand_ins = WeakTensorKeyDictionary()  # of all optimizers, which keep them
        self._replaced = WeakTensorKeyDictionary()

    def after_partition(self) -> None:
        """The model has been cut: keeps only the objects that have been replaced, and those weakly."""
        for number, parameter in enumerate(self._before):
            if parameter is not self.parameter(number):
                self._replaced[parameter] = number
        self._before.clear()

    def know_stand_ins(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Parameters with those that one more optimizer steps in their place: they count as the same ones."""
        numbers = {id(self.parameter(i)): i for i in range(len(self.names))}
        self._stand_ins.update({s: numbers[id(p)] for p, s in pairs if id(p) in numbers})

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        """Whether an optimizer steps it in the place of a parameter."""
        return tensor in self._stand_ins

    def is_local(self, number: int) -> bool:
        return number in self._is_local

    def number(self, name: str) -> int:
        return self._numbers[name]

    def parameter(self, number: int) -> torch.Tensor:
        """The object that stands in the model now."""
        return self._placement.parameter(self.names[number])

    def finder(self) -> Callable[[torch.Tensor], int | None]:
        """A function from a tensor to the number of the parameter that it is, until the model changes."""
        numbers = {id(self.parameter(i)): i for i in range(len(self.names))}

        def find(tensor: torch.Tensor) -> int | None:
            if type(tensor) is PlacedTensor:
                return self._numbers.get(getattr(tensor, "smp_parameter", ""))
            number = numbers.get(id(tensor))
            if number is None and self._stand_ins:
                number = self._stand_ins.get(tensor)
            if number is None and self._replaced:
                number = self._replaced.get(tensor)
                # One of this stage that no longer stands in the model: the script has replaced it.
                if number is not None and self.is_local(number):
                    return None
            return number

        return find

    def namer(self) -> Callable[[torch.Tensor], str | None]:
        """As :meth:`finder`, with the parameter's name."""
        find = self.finder()

        def name(tensor: torch.Tensor) -> str | None:
            number = find(tensor)
            return None if number is None else self.names[number]

        return name

    def gradients(self) -> Callable[[torch.Tensor], int | None]:
        """A function from a tensor to the number of the parameter whose gradient it is, here or away.

        A view of all of a local one counts as well: ``p.grad.detach()``, ``p.grad.data``.
        """
        parameters = [(i, self.parameter(i)) for i in range(len(self.names))]
        # With the object itself, so that its id stays valid.
        by_object = {id(p.grad): (i, p.grad) for i, p in parameters if p.grad is not None}
        by_memory = {
            key: i
            for i, gradient in by_object.values()
            if self.is_local(i) and (key := _memory(gradient)) is not None
        }

        def find(tensor: torch.Tensor) -> int | None:
            if is_away(tensor):
                tensor = root_of(tensor)
            if id(tensor) in by_object:
                return by_object[id(tensor)][0]
            key = _memory(tensor)
            return None if key is None else by_memory.get(key)

        return find

    def with_gradient(self) -> frozenset[int]:
        """Local parameters that have a gradient now."""
        return frozenset(i for i in self.local if self.parameter(i).grad is not None)

    def holds_any_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of them is a parameter of the model."""
        find = self.finder()
        return any(find(tensor) is not None for tensor in tensors)


def are_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each is the gradient of some leaf that exists, a parameter or not, or all of its memory.

    It looks at all objects that there are: ask only where nothing else tells.
    """
    wanted = {key for tensor in tensors if (key := _memory(tensor)) is not None}
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            kind = type(each)
            if not issubclass(kind, torch.Tensor) or kind is PlacedTensor:
                continue
            if each.is_leaf and (gradient := each.grad) is not None:
                wanted.discard(_memory(gradient))
    return not wanted


def _memory(tensor: torch.Tensor) -> tuple[tuple[int, int], int, torch.dtype] | None:
    """Tells tensors that are all of the same memory; None: it cannot be told."""
    if (
        type(tensor) is PlacedTensor
        or is_away(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        return None
    return (place_of(tensor), tensor.numel(), tensor.dtype) if tensor.numel() else None
