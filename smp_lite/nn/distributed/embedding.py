"""``smp.nn.DistributedEmbedding``: split by features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import SMPError
from ..one_d.operations import gather_along
from .base import DistributedModule
from .region import all_to_all

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """``torch.nn.Embedding`` split by features over the tensor-parallel ranks.

    ``weight`` is this rank's ``(num_embeddings, embedding_dim / T)``. Indices ``(B, ...)`` give ``(B, ...,
    embedding_dim)``.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in ``torch.nn.Embedding``.
        max_norm, norm_type, scale_grad_by_freq, sparse: as there, on one rank; they look at whole rows or
            at all of them, so over several ranks they are refused.
        _weight: whole, to begin with.
        initializer_range: standard deviation of the normal distribution that weights are drawn from.
        _skip_allgather: with ``prescaled_batch`` the output stays as it is inside, ``(B, ...,
            embedding_dim / T)``.
        _skip_scatter_and_merge: without it, likewise ``(T * B, ..., embedding_dim / T)``.

    Raises:
        SMPError: ``smp.init()`` was not called, or an option that is refused over several ranks.
        CannotShare: the ranks cannot share ``embedding_dim`` equally.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        self.region.check_shares("DistributedEmbedding: embedding_dim", embedding_dim)
        whole_rows = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        for option, value in whole_rows.items():
            if value and self.region.axis.size > 1:
                raise SMPError(
                    f"DistributedEmbedding: {option}={value!r} looks at whole rows, or at all of them, and "
                    f"this one is split over {self.region.axis.size} ranks: leave it out, or keep the "
                    "embedding whole with smp.set_tensor_parallelism(embedding, False)"
                )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._skip_allgather, self._skip_scatter_and_merge = _skip_allgather, _skip_scatter_and_merge
        if _weight is None:
            whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta")
            self.padding_idx = whole.padding_idx  # counted from 0
            weight = torch.empty(num_embeddings, embedding_dim).normal_(0.0, initializer_range)
            if self.padding_idx is not None:
                weight[self.padding_idx] = 0
        else:
            if list(_weight.shape) != [num_embeddings, embedding_dim]:
                raise ValueError(
                    f"DistributedEmbedding: _weight of shape {list(_weight.shape)} for "
                    f"[{num_embeddings}, {embedding_dim}]"
                )
            whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta")
            self.padding_idx, weight = whole.padding_idx, _weight.detach().clone()
        self.weight = nn.Parameter(weight)
        self.share({"weight": 1})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        region = self.region
        self.meet(input)
        ids = region.axis.all_gather(input, 0) if region.own_batches else input
        found = F.embedding(
            ids,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        if region.own_batches:
            return found if self._skip_scatter_and_merge else all_to_all(found, region.axis, 0, -1)
        return found if self._skip_allgather else gather_along(found, region.axis, -1, gradients="same")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.region.axis.size}"
