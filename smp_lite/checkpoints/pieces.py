"""Where the part of a tensor that a rank holds lies in the whole, as boxes.

A part is one box in the simplest case. It is several where a dimension holds matrices one after another that
are split each for itself (query, key and value in one), and none where a rank has nothing but padding. Boxes
of all ranks together are the whole tensor without padding, each element as often as ranks hold it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..nn.layout import ParameterLayout

__all__ = ["Box", "Piece", "boxes_of", "whole_box"]


@dataclass(frozen=True)
class Box:
    """A part of a part: the same elements as they lie in the whole and in what the rank holds."""

    offsets: tuple[int, ...]
    """In the whole tensor."""
    local: tuple[int, ...]
    """In the rank's own."""
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def within(self, part: torch.Tensor) -> torch.Tensor:
        """A view of these elements in the rank's part."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part


def whole_box(shape: Sequence[int]) -> tuple[Box, ...]:
    """Of a tensor that a rank holds whole."""
    zeros = (0,) * len(shape)
    return (Box(zeros, zeros, tuple(shape)),)


def boxes_of(layout: ParameterLayout | None, shape: Sequence[int]) -> tuple[Box, ...]:
    """This rank's part of a tensor, without padding.

    Args:
        layout: None: the rank holds all of it.
        shape: of the whole tensor.
    """
    if layout is None:
        return whole_box(shape)
    intervals = [_intervals(layout, dim) for dim in range(len(layout.shape))]
    return tuple(
        Box(tuple(start for start, _, _ in box), tuple(at for _, at, _ in box), tuple(n for _, _, n in box))
        for box in itertools.product(*intervals)
    )


def _intervals(layout: ParameterLayout, dim: int) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the part, length) of this rank's parts along a dimension."""
    parts = math.prod(axis.size for axis in layout.dims[dim])
    index = 0
    for axis in layout.dims[dim]:  # the major one first
        index = index * axis.size + axis.index
    size = layout.shape[dim]
    found: list[tuple[int, int, int]] = []
    start = at = 0
    for section in layout.sections.get(dim, (layout.padded.get(dim, size),)):
        length = section // parts
        begin = start + index * length
        kept = min(begin + length, size) - begin  # without padding
        if found and found[-1][0] + found[-1][2] == begin and found[-1][1] + found[-1][2] == at:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + kept)
        elif kept > 0 or size == 0:
            found.append((begin, at, max(kept, 0)))
        start, at = start + section, at + length
    return found


class Piece:
    """This rank's part of a tensor, to be written.

    Args:
        part: what the rank holds.
        layout: how it lies in the whole; None: it is the whole.
    """

    def __init__(self, part: torch.Tensor, layout: ParameterLayout | None = None) -> None:
        self.part = part.detach()
        self.shape = tuple(part.shape) if layout is None else layout.shape
        self.boxes = boxes_of(layout, self.shape)

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        """The elements of the box that begins there in the whole."""
        return next(box.within(self.part) for box in self.boxes if box.offsets == tuple(offsets))
