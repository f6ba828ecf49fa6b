"""Embeddings split over one axis: by the vocabulary (Shoeybi et al. 2019, section 3), or by the features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...comm.groups.axis import Axis
from ...devices import is_host
from ..layout import ParameterLayout
from .operations import gather_along, reduce_scatter_along, sum_over_ranks
from .parts import SplitModule, check_divides, layout_over, next_multiple, shallow_copy, whole

__all__ = ["FeatureParallelEmbedding", "VocabParallelEmbedding", "check_indices"]


def check_indices(indices: torch.Tensor, size: int, what: str) -> None:
    """
    Raises:
        IndexError: one of them is not in 0..size-1. On an accelerator the check does not wait, and the error
            is the device's own.
    """
    if indices.is_meta or isinstance(indices, torch._subclasses.FakeTensor) or not indices.numel():
        return
    good = ((indices >= 0) & (indices < size)).all()
    if not is_host(indices.device):
        torch._assert_async(good)
    elif not good:
        wrong = indices[(indices < 0) | (indices >= size)].flatten()[0]
        raise IndexError(f"{what} {int(wrong)} is not in 0..{size - 1}")


class _SplitEmbedding(SplitModule, nn.Embedding):
    """What both share: of the options of ``torch.nn.Embedding``, those about all rows are refused."""

    axis: Axis

    @classmethod
    def check_options(cls, dense: nn.Embedding) -> None:
        """
        Raises:
            ValueError: it has an option that a part of it cannot keep.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(dense, option):
                raise ValueError(
                    f"{cls.__name__}: an Embedding with {option}={getattr(dense, option)!r} cannot be "
                    "split: that option looks at whole rows, or at all of them, together. Leave it out, or "
                    "keep this embedding whole"
                )

    def to_dense(self) -> nn.Embedding:
        """The whole embedding; collective over the axis."""
        weight = whole(self.weight)
        dense = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, _weight=weight.detach()
        )
        dense.weight = weight
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axis={self.axis.name!r}, ranks={self.axis.size}"


class VocabParallelEmbedding(_SplitEmbedding):
    """``torch.nn.Embedding`` split by the vocabulary: each rank has an equal part of the rows.

    Indices ``(...)`` are the same on all ranks, and so is the output ``(..., embedding_dim)``: each looks up
    the rows that it has, zeros for others, and the sum is everybody's. Zero rows are added where the ranks
    cannot share the vocabulary equally; no index reaches them.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in ``torch.nn.Embedding``; weights are
            drawn as it draws them.
        axis: the ranks that share it.
        sequence_parallel: the output is this rank's part along the dimension before the last.

    Raises:
        ValueError: ``from_dense`` of an embedding with ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        IndexError: in forward, an index is not in the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        axis: Axis,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.split(axis, sequence_parallel=sequence_parallel)

    @classmethod
    def from_dense(
        cls, dense: nn.Embedding, axis: Axis, *, sequence_parallel: bool = False
    ) -> VocabParallelEmbedding:
        """This rank's part of an embedding that all ranks hold."""
        layer = shallow_copy(cls, dense)
        layer.split(axis, sequence_parallel=sequence_parallel)
        return layer

    @classmethod
    def layouts(
        cls, dense: nn.Embedding, axis: Axis, *, sequence_parallel: bool = False
    ) -> dict[str, ParameterLayout]:
        """How the weight of a dense embedding would lie; raises as ``from_dense`` does."""
        cls.check_options(dense)
        padded = next_multiple(dense.num_embeddings, axis.size)
        return {"weight": layout_over(dense.weight, axis, 0, padded=padded)}

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """Keeps this rank's part of the dense weight that it holds so far; options of the constructor."""
        layouts = VocabParallelEmbedding.layouts(self, axis, **options)
        self.axis, self.sequence_parallel = axis, options.get("sequence_parallel", False)
        self.keep_parts(layouts, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_indices(input, self.num_embeddings, f"{type(self).__name__}: index")
        rows = self.weight.shape[0]
        first = rows * self.axis.index
        elsewhere = (input < first) | (input >= first + rows)
        here = (input - first).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + rows else None
        found = F.embedding(here, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_along(found, self.axis, -2)
        return sum_over_ranks(found, self.axis)


class FeatureParallelEmbedding(_SplitEmbedding):
    """``torch.nn.Embedding`` split by the features: each rank has a part of every row.

    Indices ``(...)`` are the same on all ranks; the output is ``(..., embedding_dim)`` on all of them, or
    with ``gather_output=False`` this rank's ``(..., embedding_dim / ranks)``.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in ``torch.nn.Embedding``.
        axis: the ranks that share it.
        gather_output: every rank gets all features.

    Raises:
        ValueError: the ranks cannot share ``embedding_dim`` equally; ``from_dense`` of an embedding with
            ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        axis: Axis,
        gather_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.split(axis, gather_output=gather_output)

    @classmethod
    def from_dense(
        cls, dense: nn.Embedding, axis: Axis, *, gather_output: bool = True
    ) -> FeatureParallelEmbedding:
        """This rank's part of an embedding that all ranks hold."""
        layer = shallow_copy(cls, dense)
        layer.split(axis, gather_output=gather_output)
        return layer

    @classmethod
    def layouts(
        cls, dense: nn.Embedding, axis: Axis, *, gather_output: bool = True
    ) -> dict[str, ParameterLayout]:
        """How the weight of a dense embedding would lie; raises as ``from_dense`` does."""
        cls.check_options(dense)
        check_divides(f"{cls.__name__}: embedding_dim", dense.embedding_dim, axis)
        return {"weight": layout_over(dense.weight, axis, 1)}

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """Keeps this rank's part of the dense weight that it holds so far; options of the constructor."""
        layouts = FeatureParallelEmbedding.layouts(self, axis, **options)
        self.axis, self.gather_output = axis, options.get("gather_output", True)
        self.keep_parts(layouts, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = F.embedding(input, self.weight, self.padding_idx)
        return gather_along(found, self.axis, -1, gradients="same") if self.gather_output else found
