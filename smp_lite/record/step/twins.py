"""Placed twins of ordinary tensors that a microbatch changes in place with placed operands.

``total += loss`` with an ordinary ``total`` cannot be computed on every rank. From then on a placed tensor,
its twin, stands in for ``total``; when the microbatch ends, its value is written back on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..values.calls import Arguments
from ..values.memory import storage_of
from ..values.placed import PlacedTensor

__all__ = ["Twins"]


class Twins:
    """The twins of one microbatch.

    Attributes:
        by_id: of each tensor that has one; every recorded call asks whether there are any.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[weakref.ref[torch.Tensor], PlacedTensor]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def get(self, tensor: Any) -> PlacedTensor | None:
        """The twin of ``tensor``, which may be anything; None if it has none."""
        found = self.by_id.get(id(tensor))
        return found[1] if found is not None else None

    def add(self, tensor: torch.Tensor, twin: PlacedTensor) -> None:
        """From now on ``twin`` stands in for ``tensor``."""
        key, by_id = id(tensor), self.by_id
        # When it dies its id is free for another tensor, which must not get its twin.
        by_id[key] = (weakref.ref(tensor, lambda _: by_id.pop(key, None)), twin)

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor in the arguments has a twin."""
        return bool(self) and any(id(tensor) in self.by_id for tensor in Arguments.of(args, kwargs).tensors)

    def overlap(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors shares memory with one that has a twin, without being it."""
        if not self:
            return False
        memories = {
            storage_of(target) for reference, _ in self.by_id.values() if (target := reference()) is not None
        }
        return any(
            type(tensor) is not PlacedTensor
            and id(tensor) not in self.by_id
            and storage_of(tensor) in memories
            for tensor in tensors
        )

    def need_gradients(self) -> bool:
        """Whether a gradient is to flow through any of the twins."""
        return any(twin.smp_meta.requires_grad for _, twin in self.by_id.values())

    def of_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of the tensors has a twin."""
        return bool(self) and any(id(tensor) in self.by_id for tensor in tensors)

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
        pairs = [(reference(), twin) for reference, twin in self.by_id.values()]
        self.by_id.clear()
        return [(tensor, twin) for tensor, twin in pairs if tensor is not None]
