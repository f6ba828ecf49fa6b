"""Layers whose parameters every rank holds, on this rank's tokens: gradients are summed over the ranks."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from ..grid.checks import check_ids
from ..grid.laid_out import LaidOut
from ..grid.lookup import check_embedding
from ..layout import ParameterLayout
from .mesh import SequenceMesh

__all__ = ["SequenceEmbedding", "SequenceLayerNorm", "SequenceLinear", "SequenceRMSNorm"]


class _Whole(LaidOut):
    """A layer of torch's, with ``mesh`` after its first arguments.

    Each rank's tokens give a summand of the gradients, so their layouts have ``partial_over`` the axis. The
    first values are those that torch's layer draws, so all ranks need the same random state.
    """

    mesh: SequenceMesh

    @classmethod
    def from_dense(cls, dense: nn.Module, mesh: SequenceMesh) -> Self:
        """With a copy of the parameters."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Module, mesh: SequenceMesh) -> None:
        self.mesh = mesh
        self._copy_options(dense)
        layouts = {
            name: ParameterLayout(tuple(parameter.shape), ((),) * parameter.dim(), (mesh.axis,))
            for name, parameter in dense._parameters.items()
            if parameter is not None
        }
        self._hold(dense, layouts)

    def _copy_options(self, dense: Any) -> None:
        raise NotImplementedError  # each layer's own

    def to_dense(self) -> Any:
        """Torch's layer, with a copy of the parameters."""
        dense = self._make_dense()
        self._give(dense)
        return dense

    def _make_dense(self) -> nn.Module:
        raise NotImplementedError  # each layer's own


class SequenceLinear(_Whole):
    """``torch.nn.Linear`` of this rank's tokens."""

    dense_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: SequenceMesh,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), mesh)

    def _copy_options(self, dense: nn.Linear) -> None:
        self.in_features, self.out_features = dense.in_features, dense.out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias)

    def _make_dense(self) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")


class SequenceEmbedding(_Whole):
    """``torch.nn.Embedding`` of this rank's tokens, or of their positions (``mesh.positions``)."""

    dense_type = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: SequenceMesh,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype), mesh)

    def _copy_options(self, dense: nn.Embedding) -> None:
        check_embedding(dense)
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.padding_idx = dense.padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_ids("SequenceEmbedding: ids", input, self.num_embeddings)
        return F.embedding(input, self.weight, self.padding_idx)

    def _make_dense(self) -> nn.Embedding:
        shape = (self.num_embeddings, self.embedding_dim)
        return nn.Embedding(*shape, padding_idx=self.padding_idx, device="meta")


class SequenceLayerNorm(_Whole):
    """``torch.nn.LayerNorm`` of this rank's tokens."""

    dense_type = nn.LayerNorm

    def __init__(
        self,
        normalized_shape: int | list[int],
        mesh: SequenceMesh,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.LayerNorm(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self._take(dense, mesh)

    def _copy_options(self, dense: nn.LayerNorm) -> None:
        self.normalized_shape, self.eps = list(dense.normalized_shape), dense.eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def _make_dense(self) -> nn.LayerNorm:
        affine, bias = self.weight is not None, self.bias is not None
        return nn.LayerNorm(self.normalized_shape, self.eps, affine, bias, device="meta")


class SequenceRMSNorm(_Whole):
    """``torch.nn.RMSNorm`` of this rank's tokens."""

    dense_type = nn.RMSNorm

    def __init__(
        self,
        normalized_shape: int | list[int],
        mesh: SequenceMesh,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.RMSNorm(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self._take(dense, mesh)

    def _copy_options(self, dense: nn.RMSNorm) -> None:
        self.normalized_shape, self.eps = list(dense.normalized_shape), dense.eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def _make_dense(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.normalized_shape, self.eps, self.weight is not None, device="meta")
