"""Placed twins of ordinary tensors that a microbatch changes in place with placed operands.

``total += loss`` with an ordinary ``total`` cannot be computed on every rank. From then on a placed tensor,
its twin, stands in for ``total``; when the microbatch ends, its value is written back on every rank.

Where a view changes (``rows[0].add_(loss)``) its base gets the twin, and a view of that stands in for the
view. What has a twin is not kept for its sake (a buffer that a layer makes, fills and reads would be sent
around for nobody), unless others share its memory, whom autograd does not know of: ``rows.data``, numpy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..values.calls import Arguments
from ..values.memory import is_shared, num_users, storage_of
from ..values.placed import PlacedTensor

__all__ = ["Twins"]


class Twin(NamedTuple):
    """What stands in for a tensor.

    Attributes:
        tensor: gives the tensor; None: it is gone.
        placed: what stands in for it.
        is_view: of what stands in for its base, which is what is written back.
    """

    tensor: Callable[[], torch.Tensor | None]
    placed: PlacedTensor
    is_view: bool


class Twins:
    """The twins of one microbatch.

    Attributes:
        by_id: of each tensor that has one; every recorded call asks whether there are any.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Twin] = {}

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def get(self, tensor: Any) -> PlacedTensor | None:
        """The twin of ``tensor``, which may be anything; None if it has none."""
        found = self.by_id.get(id(tensor))
        return found.placed if found is not None else None

    def add(self, tensor: torch.Tensor, twin: PlacedTensor, *, users: int) -> None:
        """From now on ``twin`` stands in for ``tensor``.

        Args:
            tensor: no view.
            twin: its value by now.
            users: tensors that share its memory and are known: itself, and the view of it that changes.
        """
        kept = num_users(tensor) > users or is_shared(tensor)
        self._add(tensor, twin, kept=kept, is_view=False)

    def add_view(self, view: torch.Tensor, placed: PlacedTensor) -> None:
        """From now on ``placed``, a view of its base's twin, stands in for ``view``."""
        self._add(view, placed, kept=False, is_view=True)

    def _add(self, tensor: torch.Tensor, placed: PlacedTensor, *, kept: bool, is_view: bool) -> None:
        key, by_id = id(tensor), self.by_id
        if kept:
            by_id[key] = Twin(lambda: tensor, placed, is_view)
        else:  # when it dies its id is free for another tensor, which must not get its twin
            by_id[key] = Twin(weakref.ref(tensor, lambda _: by_id.pop(key, None)), placed, is_view)

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor in the arguments has a twin."""
        return bool(self) and any(id(tensor) in self.by_id for tensor in Arguments.of(args, kwargs).tensors)

    def overlap(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors shares memory with one that has a twin, without having one."""
        if not self:
            return False
        memories = self._memories()
        return any(
            type(tensor) is not PlacedTensor
            and id(tensor) not in self.by_id
            and storage_of(tensor) in memories
            for tensor in tensors
        )

    def _memories(self) -> set[int | None]:
        return {storage_of(found) for twin in self.by_id.values() if (found := twin.tensor()) is not None}

    def need_gradients(self) -> bool:
        """Whether a gradient is to flow through any of the twins."""
        return any(twin.placed.smp_meta.requires_grad for twin in self.by_id.values())

    def of_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors has a twin, or shares memory with one that has."""
        if not self:
            return False
        memories = self._memories()
        return any(id(tensor) in self.by_id or storage_of(tensor) in memories for tensor in tensors)

    def substitute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with twins in the places of their tensors."""
        arguments = Arguments.of(args, kwargs)
        twins = [self.get(tensor) for tensor in arguments.tensors]
        return arguments.build(
            [twin if twin is not None else tensor for twin, tensor in zip(twins, arguments.tensors)]
        )

    def take_all(self) -> list[tuple[torch.Tensor, PlacedTensor]]:
        """Tensors that are still there, and their twins, which stand in for them no more."""
        pairs = [(twin.tensor(), twin.placed) for twin in self.by_id.values() if not twin.is_view]
        self.by_id.clear()
        return [(tensor, placed) for tensor, placed in pairs if tensor is not None]
