"""The ranks that share a sequence, and which tokens each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...comm.groups.axis import Axis
from ...devices import CPU
from ...record.values.parts import mark_part
from ..grid.axes import Collect, axes_of_block, join_parts
from ..grid.checks import check_divides
from ..one_d.operations import split_along

__all__ = ["SequenceMesh"]


@dataclass(frozen=True)
class SequenceMesh:
    """P ranks, each with an equal part of the tokens of every sequence of the batch.

    Attributes:
        axis: the ranks.
        zigzag: the tokens are cut into 2 P chunks, of which rank r has chunks r and 2 P - 1 - r. So in causal
            ring attention all ranks have the same work. False: P chunks, one for each rank in order.

    A tensor ``(batch, tokens, ...)`` has its part ``(batch, tokens / P, ...)`` on each rank, chunks in the
    order of the sequence.
    """

    axis: Axis
    zigzag: bool = True

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[int], rank: int, collect: Collect | None = None, *, zigzag: bool = True
    ) -> SequenceMesh:
        """
        Args:
            ranks: world ranks, ascending.
            rank: the world rank that asks, one of them.
            collect: makes collectives of world ranks; None where there are no processes.
            zigzag: see above.
        """
        return cls(*axes_of_block((("sequence", len(ranks)),), ranks, rank, collect), zigzag)

    @property
    def size(self) -> int:
        """Ranks."""
        return self.axis.size

    # Which tokens -----------------------------------------------------------------------------------------

    def positions(self, num_tokens: int, *, index: int | None = None) -> torch.Tensor:
        """Where in the whole sequence the tokens of a rank stand, ``(num_tokens / P)``, int64: for position
        ids, rotary embeddings and masks.

        Args:
            num_tokens: of the whole sequence.
            index: of the rank on the axis; None: this one.

        Raises:
            ValueError: the ranks cannot share the tokens equally.
        """
        check_divides("SequenceMesh: a sequence of tokens", num_tokens, (self.axis,), 2 if self.zigzag else 1)
        if index is None:
            here = self.axis.index
            how = f"positions over {self.axis.name}{', zigzag' if self.zigzag else ''}"
            return mark_part(
                self.positions(num_tokens, index=here),
                torch.arange(num_tokens, device=CPU),
                how,
                lambda whole: whole[self.positions(num_tokens, index=here)],
            )
        if not self.zigzag:
            size = num_tokens // self.size
            return torch.arange(index * size, (index + 1) * size, device=CPU)
        size = num_tokens // (2 * self.size)
        other = 2 * self.size - 1 - index
        first = torch.arange(index * size, (index + 1) * size, device=CPU)
        return torch.cat([first, torch.arange(other * size, (other + 1) * size, device=CPU)])

    def order(self, num_tokens: int) -> torch.Tensor:
        """The positions of all ranks' tokens, rank after rank, ``(num_tokens)``."""
        return torch.cat([self.positions(num_tokens, index=index) for index in range(self.size)])

    def in_rank_order(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Whole sequences, with the tokens rank after rank; differentiable."""
        return x.index_select(dim, self.order(x.shape[dim]).to(x.device)) if self._reorders else x

    def in_sequence(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The other way round."""
        return x.index_select(dim, self.order(x.shape[dim]).argsort().to(x.device)) if self._reorders else x

    @property
    def _reorders(self) -> bool:
        return self.zigzag and self.size > 1

    # Whole tensors, the same on all ranks, and parts ------------------------------------------------------

    def split_input(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``(batch, tokens, ...)``; differentiable."""
        return self._split(x, 1)

    def split_batch(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``(batch, tokens)``: token ids, targets."""
        return self._split(x, 1)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole of a part ``(batch, tokens / P, ...)``."""
        return (part[0], part[1] * self.size, *part[2:])

    def split_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """This rank's queries of an attention mask, which broadcasts to ``(batch, heads, tokens, keys)``; all
        keys, in the order of the sequence.
        """
        return self._split(mask, mask.dim() - 2) if mask.shape[-2] > 1 else mask

    def gather_output(self, y: torch.Tensor) -> torch.Tensor:
        """The whole of a part ``(batch, tokens / P, ...)``, on all ranks; differentiable."""
        return self.in_sequence(join_parts(y, (self.axis,), None, None, 1))

    gather_batch = gather_output

    def _split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.dim() <= dim:
            raise ValueError(
                f"SequenceMesh: a tensor of shape {list(x.shape)} has no tokens in dimension {dim}"
            )
        what = f"SequenceMesh: dimension {dim} (tokens) of a tensor of shape {list(x.shape)},"
        check_divides(what, x.shape[dim], (self.axis,), 2 if self.zigzag else 1)
        part = split_along(self.in_rank_order(x, dim), self.axis, dim)
        how = f"{'zigzag ' if self.zigzag else ''}dimension {dim} over {self.axis.name}"
        return mark_part(part, x, how, lambda whole: self.axis.part(self.in_rank_order(whole, dim), dim))
