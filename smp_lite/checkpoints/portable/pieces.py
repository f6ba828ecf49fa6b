"""Where the part of a tensor that a rank holds lies in the whole, as boxes.

A part is one box in the simplest case. It is several where a dimension holds matrices one after another that
are split each for itself (query, key and value in one) or where a rank has a piece of a tensor's elements in
row-major order (a sharded parameter), and none where a rank has nothing but padding. Boxes
of all ranks together are the whole tensor without padding, each element as often as ranks hold it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...nn.layout import ParameterLayout

__all__ = ["Box", "Piece", "boxes_of", "whole_box"]


@dataclass(frozen=True)
class Box:
    """A part of a part: the same elements as they lie in the whole and in what the rank holds."""

    offsets: tuple[int, ...]
    """In the whole tensor."""
    local: tuple[int, ...]
    """In the rank's own; of a flat piece, the position of the first element."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Of the elements in a flat piece."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def within(self, part: torch.Tensor) -> torch.Tensor:
        """A view of these elements in the rank's part."""
        if self.strides is not None:
            return part.as_strided(self.sizes, self.strides, part.storage_offset() + self.local[0])
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
    boxes = tuple(
        Box(tuple(start for start, _, _ in box), tuple(at for _, at, _ in box), tuple(n for _, _, n in box))
        for box in itertools.product(*intervals)
    )
    if layout.flat is None:
        return boxes
    (length,) = layout.local_shape
    begin = layout.flat.index * length
    ranges = _ranges(layout.part_shape, begin, min(begin + length, math.prod(layout.part_shape)))
    return tuple(
        found
        for low, high in ranges
        for box in boxes
        if (found := _in_piece(box, low, high, layout.part_shape, begin)) is not None
    )


def _ranges(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes, as (low, high) corners, that are the elements begin ... end - 1 in row-major order."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        inner = _ranges(shape[1:], begin - last * row, end - last * row)
        return [((last, *low), (last + 1, *high)) for low, high in inner]
    found = [
        ((first - 1, *low), (first, *high))
        for low, high in (_ranges(shape[1:], begin - (first - 1) * row, row) if begin < first * row else [])
    ]
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last, *shape[1:])))
    if end > last * row:
        found += [((last, *low), (last + 1, *high)) for low, high in _ranges(shape[1:], 0, end - last * row)]
    return found


def _in_piece(
    box: Box, low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...], begin: int
) -> Box | None:
    """What of a box of the part lies between two corners, as it lies in the piece; None: nothing."""
    starts = tuple(max(at, start) for at, start in zip(box.local, low, strict=True))
    ends = tuple(min(at + n, end) for at, n, end in zip(box.local, box.sizes, high, strict=True))
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    position = sum(start * stride for start, stride in zip(starts, strides, strict=True)) - begin
    return Box(
        offsets=tuple(
            offset + start - at for offset, start, at in zip(box.offsets, starts, box.local, strict=True)
        ),
        local=(position,),
        sizes=tuple(end - start for start, end in zip(starts, ends, strict=True)),
        strides=strides,
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
