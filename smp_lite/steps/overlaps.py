"""Tensors of a batch that share memory, such as inputs and labels that are views of one tensor.

Where a step function changes one of them in place, the other changes too. So they are handed over together:
the stretch of memory that they lie in, and where each of them lies in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..devices import CPU, is_host

__all__ = ["Overlap", "memory_of", "overlaps", "tensors_in"]

_ALIGNMENT = 16
"""Bytes; a tensor lies at a multiple of its items' size, and on arrival must again."""


@dataclass(frozen=True)
class Overlap:
    """How some tensors of one batch lie in a stretch of memory.

    Attributes:
        members: their numbers in the batch, ascending.
        places: of each member dtype, shape, strides, and bytes from the start.
        num_bytes: how long the stretch is.
        shift: bytes between its start and the multiple of 16 before it.
    """

    members: tuple[int, ...]
    places: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]
    num_bytes: int
    shift: int

    @property
    def pattern(self) -> tuple[object, ...]:
        """The same for batches of the same making, wherever they lie."""
        return self.members, self.places


def overlaps(tensors: Sequence[torch.Tensor]) -> list[Overlap]:
    """Groups of two or more of dense CPU tensors whose stretches of memory meet; others are left out."""
    stretches = []
    for number, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and is_host(tensor.device) and tensor.numel():
            stretches.append((*_stretch(tensor), number))
    groups: list[list[int]] = []
    end = 0
    for start, own_end, number in sorted(stretches):
        if start < end:
            groups[-1].append(number)
        else:
            groups.append([number])
        end = max(end, own_end)
    return [_overlap(tensors, sorted(group)) for group in groups if len(group) > 1]


def memory_of(overlap: Overlap, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stretch as one row of bytes: no copy, and none of its own reasons to stay alive."""
    start = min(_stretch(tensors[member])[0] for member in overlap.members)
    return torch.frombuffer((ctypes.c_uint8 * overlap.num_bytes).from_address(start), dtype=torch.uint8)


def tensors_in(overlap: Overlap) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """New memory for the stretch, still to be written, and the tensors that lie in it, by their numbers.

    They are views of one tensor, so that torch knows of each what has been done to another.
    """
    memory = torch.empty(overlap.shift + overlap.num_bytes, dtype=torch.uint8, device=CPU)
    made: dict[int, torch.Tensor] = {}
    for member, (dtype, shape, stride, offset) in zip(overlap.members, overlap.places, strict=True):
        whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        made[member] = whole.as_strided(shape, stride, (overlap.shift + offset) // dtype.itemsize)
    return memory[overlap.shift :], made


def _overlap(tensors: Sequence[torch.Tensor], members: list[int]) -> Overlap:
    stretches = [_stretch(tensors[member]) for member in members]
    start = min(first for first, _ in stretches)
    return Overlap(
        tuple(members),
        tuple(
            (tensors[member].dtype, tuple(tensors[member].shape), tensors[member].stride(), first - start)
            for member, (first, _) in zip(members, stretches, strict=True)
        ),
        max(end for _, end in stretches) - start,
        start % _ALIGNMENT,
    )


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last."""
    steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.dtype.itemsize
