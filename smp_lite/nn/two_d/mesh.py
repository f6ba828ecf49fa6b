"""The ranks of a 2D and of a 2.5D layer, and where tensors lie on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...comm.groups.axis import Axis
from ..grid.axes import Collect, axes_of_block, join_parts, split_parts, square_root
from ..grid.checks import check_square

__all__ = ["Mesh2D", "Mesh25D", "SummaMesh"]


class SummaMesh:
    """What the layers of this folder need of a :class:`Mesh2D` or :class:`Mesh25D`."""

    row: Axis
    col: Axis

    def __post_init__(self) -> None:
        check_square("row and col", (self.row.size, self.col.size))

    @property
    def batch_axes(self) -> tuple[Axis, ...]:
        """What splits the batch, the major axis first."""
        raise NotImplementedError  # that of the mesh with or without depth

    @property
    def copies(self) -> tuple[Axis, ...]:
        """Axes whose members hold the same parts of parameters, each with a summand of their gradients."""
        raise NotImplementedError  # that of the mesh with or without depth

    @property
    def q(self) -> int:
        """Ranks of a row and of a column."""
        return self.row.size

    # Whole tensors, the same on all ranks, and parts ------------------------------------------------------

    def split_input(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``(batch, ..., features)``; differentiable."""
        return split_parts(x, type(self).__name__, self.batch_axes, self.col)

    def split_batch(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``(batch, ...)``: token ids, targets."""
        return split_parts(x, type(self).__name__, self.batch_axes, None)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole of a part ``(batch / q, ..., features / q)``."""
        rows = math.prod(axis.size for axis in self.batch_axes)
        return (part[0] * rows, *part[1:-1], part[-1] * self.col.size)

    def split_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """This rank's part of an attention mask, which broadcasts to ``(batch, heads, tokens, keys)``."""
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = split_parts(mask, type(self).__name__, self.batch_axes, None)
        if mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = split_parts(mask, type(self).__name__, (self.col,), None, mask.dim() - 3)
        return mask

    def gather_output(self, y: torch.Tensor, num_features: int | None = None) -> torch.Tensor:
        """The whole of a part ``(batch / q, ..., features / q)``, on all ranks; differentiable.

        Args:
            num_features: without the padding of a vocabulary; None: there is none.
        """
        return join_parts(y, self.batch_axes, self.col, num_features)

    def gather_batch(self, y: torch.Tensor) -> torch.Tensor:
        """All rows of ``(batch / q, ...)`` that has no features."""
        return join_parts(y, self.batch_axes, None, None)


@dataclass(frozen=True)
class Mesh2D(SummaMesh):
    """q x q ranks (Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models",
    arXiv 2104.05343).

    Rank t of the block is at row i and column j with ``t = j + q i``. An axis is named by the index that
    differs among its members:

    Attributes:
        row: the ranks of one *column* of the grid, by their row. It splits the batch.
        col: the ranks of one *row* of the grid, by their column. It splits features.

    A tensor ``(batch, ..., features)`` has its part ``(batch / q, ..., features / q)`` on each rank.
    """

    row: Axis
    col: Axis

    @classmethod
    def from_ranks(cls, ranks: Sequence[int], rank: int, collect: Collect | None = None) -> Mesh2D:
        """
        Args:
            ranks: world ranks of the block, ascending; a square number.
            rank: the world rank that asks, one of them.
            collect: makes collectives of world ranks; None where there are no processes.
        """
        q = square_root(len(ranks), "a 2D mesh")
        return cls(*axes_of_block((("row", q), ("col", q)), ranks, rank, collect))

    @property
    def batch_axes(self) -> tuple[Axis, ...]:
        return (self.row,)

    @property
    def copies(self) -> tuple[Axis, ...]:
        return ()


@dataclass(frozen=True)
class Mesh25D(SummaMesh):
    """d layers of q x q ranks (Wang et al. 2021, "Tesseract: Parallelize the Tensor Parallelism Efficiently",
    arXiv 2105.14500).

    Rank t of the block is at depth h, row i and column j with ``t = j + q (i + q h)``.

    Attributes:
        depth: the ranks at one row and column, by their layer. It splits the batch, before ``row`` does. Its
            members hold the same parts of parameters.
        row, col: as in :class:`Mesh2D`, within one layer.

    Each layer of the mesh works on other rows of the batch, so gradients of parameters are summed over
    ``depth``: their layouts say so (``partial_over``).
    """

    depth: Axis
    row: Axis
    col: Axis

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[int], rank: int, collect: Collect | None = None, *, depth: int
    ) -> Mesh25D:
        """
        Args:
            ranks: world ranks of the block, ascending; ``depth`` times a square number.
            depth: layers.
            rank, collect: as in :class:`Mesh2D`.
        """
        if depth < 1 or len(ranks) % depth:
            raise ValueError(f"depth={depth} does not divide the {len(ranks)} ranks of a 2.5D mesh")
        q = square_root(len(ranks) // depth, f"a layer of a 2.5D mesh of {len(ranks)} ranks, depth {depth}")
        found = axes_of_block((("depth", depth), ("row", q), ("col", q)), ranks, rank, collect)
        return cls(*found)

    @property
    def batch_axes(self) -> tuple[Axis, ...]:
        return (self.depth, self.row)

    @property
    def copies(self) -> tuple[Axis, ...]:
        return (self.depth,)
