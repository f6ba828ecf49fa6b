"""The ranks of a 3D layer, and the two ways in which tensors lie on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...comm.groups.axis import Axis
from ..grid.axes import Collect, axes_of_block, join_parts, split_parts, square_root
from ..grid.checks import check_square
from .layout import Layout3D, check_layout, tagged

__all__ = ["Mesh3D"]


@dataclass(frozen=True)
class Mesh3D:
    """d x d x d ranks (Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural
    Networks", arXiv 2105.14450).

    Rank t of the block has the indices i, j and k with ``t = i + d (j + d k)``. An axis is named by what a
    product of layout ``Layout3D.IN`` does over it, and varies one index:

    Attributes:
        input: varies j. Inputs are gathered over it.
        weight: varies i, the fastest. Weights are gathered over it.
        output: varies k. Outputs are summed over it.

    A tensor ``(batch, ..., features)`` has its part ``(batch / d^2, ..., features / d)`` on each rank, in one
    of two layouts (:class:`~smp_lite.nn.three_d.Layout3D`). A matrix product takes one and gives the other.
    """

    input: Axis
    weight: Axis
    output: Axis

    def __post_init__(self) -> None:
        check_square("input, weight and output", (self.input.size, self.weight.size, self.output.size))

    @classmethod
    def from_ranks(cls, ranks: Sequence[int], rank: int, collect: Collect | None = None) -> Mesh3D:
        """
        Args:
            ranks: world ranks of the block, ascending; a cube number.
            rank: the world rank that asks, one of them.
            collect: makes collectives of world ranks; None where there are no processes.
        """
        d = square_root(len(ranks), "a 3D mesh", 3)
        sizes = (("output", d), ("input", d), ("weight", d))
        output, input, weight = axes_of_block(sizes, ranks, rank, collect)
        return cls(input, weight, output)

    @property
    def d(self) -> int:
        """Ranks of each axis."""
        return self.weight.size

    # Where tensors lie ------------------------------------------------------------------------------------

    def rows(self, layout: Layout3D | str) -> tuple[Axis, Axis]:
        """The axes over which the batch lies, the major one first."""
        return (self.weight, self.input if Layout3D.of(layout) is Layout3D.IN else self.output)

    def features(self, layout: Layout3D | str) -> Axis:
        """The axis over which features lie."""
        return self.output if Layout3D.of(layout) is Layout3D.IN else self.input

    # Whole tensors, the same on all ranks, and parts ------------------------------------------------------

    def split_input(self, x: torch.Tensor, layout: Layout3D | str) -> torch.Tensor:
        """This rank's part of ``(batch, ..., features)``; differentiable."""
        part = split_parts(x, "Mesh3D", self.rows(layout), self.features(layout))
        return tagged(part, Layout3D.of(layout), self.d)

    def split_batch(self, x: torch.Tensor, layout: Layout3D | str) -> torch.Tensor:
        """This rank's rows of ``(batch, ...)``: token ids in the layout that the embedding gives, targets in
        that of the logits.
        """
        return tagged(split_parts(x, "Mesh3D", self.rows(layout), None), Layout3D.of(layout), self.d)

    def whole_shape(self, part: Sequence[int], layout: Layout3D | str) -> tuple[int, ...]:
        """The shape of the whole of a part ``(batch / d^2, ..., features / d)``."""
        rows = math.prod(axis.size for axis in self.rows(layout))
        return (part[0] * rows, *part[1:-1], part[-1] * self.features(layout).size)

    def split_mask(self, mask: torch.Tensor, layout: Layout3D | str) -> torch.Tensor:
        """This rank's part of a mask that broadcasts to ``(batch, heads, tokens, keys)``, for attention that
        takes ``layout``: its heads lie in the other one.
        """
        inside = Layout3D.of(layout).swapped
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = split_parts(mask, "Mesh3D", self.rows(inside), None)
        if mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = split_parts(mask, "Mesh3D", (self.features(inside),), None, mask.dim() - 3)
        return mask

    def gather_output(
        self, y: torch.Tensor, layout: Layout3D | str, num_features: int | None = None
    ) -> torch.Tensor:
        """The whole of a part ``(batch / d^2, ..., features / d)``, on all ranks; differentiable.

        Args:
            num_features: without the padding of a vocabulary; None: there is none.
        """
        check_layout("Mesh3D.gather_output", y, Layout3D.of(layout))
        return join_parts(y, self.rows(layout), self.features(layout), num_features)

    def gather_batch(self, y: torch.Tensor, layout: Layout3D | str) -> torch.Tensor:
        """All rows of ``(batch / d^2, ...)`` that has no features."""
        check_layout("Mesh3D.gather_batch", y, Layout3D.of(layout))
        return join_parts(y, self.rows(layout), None, None)
