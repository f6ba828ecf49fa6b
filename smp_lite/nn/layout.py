"""How a parameter lies over the axes of its stage's ranks: which part each rank holds, and what its gradient
still lacks after backward.

A parallel layer marks each of its parameters with a :class:`ParameterLayout`. Whoever must see the whole
parameter reads that: gradient reduction, norms, state dicts, checkpoints, tests. A parameter without one is
the same on all ranks of the stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..comm.groups.axis import Axis
from .guarding import plain

__all__ = [
    "ParameterLayout",
    "is_part",
    "is_sharded",
    "layout_of",
    "part_of",
    "set_layout",
    "sum_partial_gradients",
    "whole_of",
]

_ATTRIBUTE = "smp_layout"


@dataclass(frozen=True)
class ParameterLayout:
    """The parts of one parameter.

    Attributes:
        shape: of the whole parameter, without padding.
        dims: for each dimension the axes that split it into equal consecutive parts, the major one first; an
            empty tuple: it is whole on every rank.
        partial_over: axes whose members each have a summand of the gradient after backward; the runtime adds
            them up once a step. The members of an axis that is neither here nor in ``dims`` have the same
            gradient.
        sections: for a dimension that holds several matrices one after another (query, key and value in one),
            the size of each; every section is split for itself.
        padded: for a dimension that does not divide (the vocabulary), its size with the padding at its end,
            which holds zeros.
        flat: an axis along which that part lies in equal consecutive pieces of its elements in row-major
            order, one-dimensional and with zeros at the end of the last (sharded parameters, ZeRO-3:
            Rajbhandari et al. 2020). None: it does not.
        stride: with ``flat``, of the whole parameter in memory (channels last); None: its elements are one
            after another.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[Axis, ...], ...]
    partial_over: tuple[Axis, ...] = ()
    sections: dict[int, tuple[int, ...]] = field(default_factory=dict)
    padded: dict[int, int] = field(default_factory=dict)
    flat: Axis | None = None
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise ValueError(f"a layout of {len(self.dims)} dimensions for the shape {list(self.shape)}")
        for dim, axes in enumerate(self.dims):
            for size in self.sections.get(dim, (self._padded(dim),)):
                parts = math.prod(axis.size for axis in axes)
                if size % parts:
                    below, above = size // parts * parts, -(-size // parts) * parts
                    nearest = f"{below} or {above}" if below else f"{above}"
                    names = " x ".join(f"{axis.name} {axis.size}" for axis in axes)
                    raise ValueError(
                        f"dimension {dim} of a parameter of shape {list(self.shape)} has {size} elements, "
                        f"which {parts} ranks ({names}) cannot share equally; the nearest sizes that they "
                        f"can: {nearest}"
                    )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes over which the ranks differ in their parts."""
        flat = () if self.flat is None else (self.flat,)
        return (*(axis for axes in self.dims for axis in axes), *flat)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that ``dims`` leave a rank, which is what its layer computes with."""
        return tuple(
            self._padded(dim) // math.prod(axis.size for axis in axes) for dim, axes in enumerate(self.dims)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what each rank holds."""
        if self.flat is None:
            return self.part_shape
        return (-(-math.prod(self.part_shape) // self.flat.size),)

    def part(self) -> ParameterLayout:
        """How that part lies which ``flat`` cuts into pieces."""
        return replace(self, flat=None)

    def _padded(self, dim: int) -> int:
        return self.padded.get(dim, self.shape[dim])


def set_layout(parameter: nn.Parameter, layout: ParameterLayout) -> None:
    """Marks a parameter, which holds this rank's part, with how it lies.

    Raises:
        ValueError: its shape is not that of a part.
    """
    if tuple(parameter.shape) != layout.local_shape:
        raise ValueError(
            f"a part of shape {list(parameter.shape)} for a layout with parts of {list(layout.local_shape)}"
        )
    setattr(parameter, _ATTRIBUTE, layout)


def layout_of(parameter: torch.Tensor) -> ParameterLayout | None:
    """How it lies; None: it is the same on all ranks of its stage."""
    found: ParameterLayout | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def is_part(parameter: torch.Tensor) -> bool:
    """Whether other ranks have other parts of it."""
    layout = layout_of(parameter)
    return layout is not None and any(axis.size > 1 for axis in layout.axes)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether its part lies in pieces."""
    layout = layout_of(parameter)
    return layout is not None and layout.flat is not None


def part_of(whole: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    """This rank's part of a whole parameter, padded with zeros; memory of its own.

    Raises:
        ValueError: the shape is another one.
    """
    if tuple(whole.shape) != layout.shape:
        raise ValueError(f"a tensor of shape {list(whole.shape)} for a parameter of {list(layout.shape)}")
    part = plain(whole)
    for dim, size in layout.padded.items():
        short = [*part.shape]
        short[dim] = size - part.shape[dim]
        part = torch.cat([part, part.new_zeros(short)], dim)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            split = _sections(part, dim, layout)
            part = torch.cat([axis.part(each, dim) for each in split], dim) if axis.size > 1 else part
    if layout.flat is not None:
        (length,) = layout.local_shape
        row = part.reshape(-1)
        part = layout.flat.part(torch.cat([row, row.new_zeros(length * layout.flat.size - len(row))]), 0)
    return part.clone(memory_format=torch.contiguous_format)


def whole_of(part: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    """The whole from the parts, without padding; collective over the layout's axes.

    Works for what has the parameter's layout too: its gradient, and state of an optimizer.
    """
    whole = plain(part)
    if layout.flat is not None:
        row = layout.flat.all_gather(whole)
        whole = row[: math.prod(layout.part_shape)].view(layout.part_shape)
    for dim, axes in enumerate(layout.dims):
        for axis in reversed(axes):
            if axis.size == 1:
                continue
            gathered = axis.all_gather(whole, dim)
            parts = [_sections(each, dim, layout) for each in gathered.chunk(axis.size, dim)]
            whole = torch.cat([piece for section in zip(*parts, strict=True) for piece in section], dim)
    for dim in layout.padded:
        whole = whole.narrow(dim, 0, layout.shape[dim])
    if layout.stride is not None and whole.shape == layout.shape and not any(layout.dims):
        return torch.empty_strided(whole.shape, layout.stride, dtype=whole.dtype, device=whole.device).copy_(
            whole
        )
    return whole.clone(memory_format=torch.contiguous_format)


def _sections(tensor: torch.Tensor, dim: int, layout: ParameterLayout) -> Sequence[torch.Tensor]:
    """The tensor's part of each section."""
    sizes = layout.sections.get(dim)
    if sizes is None:
        return (tensor,)
    parts = sum(sizes) // tensor.shape[dim]
    return tensor.split([size // parts for size in sizes], dim)


def sum_partial_gradients(module: nn.Module) -> None:
    """Adds up the summands of gradients over ``partial_over``; for layers used without the runtime."""
    for parameter, layout in _laid_out(module):
        if parameter.grad is not None:
            for axis in layout.partial_over:
                parameter.grad = axis.all_reduce(parameter.grad)


def _laid_out(module: nn.Module) -> Iterator[tuple[nn.Parameter, ParameterLayout]]:
    for parameter in module.parameters():
        layout = layout_of(parameter)
        if layout is not None:
            yield parameter, layout
