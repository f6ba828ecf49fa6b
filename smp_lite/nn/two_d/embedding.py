"""Embeddings on a 2D or 2.5D mesh: split by features, or by vocabulary too."""

from __future__ import annotations

import torch
from torch import nn

from ..grid.checks import check_divides, check_ids
from ..grid.lookup import check_embedding, masked_lookup
from ..layout import ParameterLayout
from ..one_d.operations import gather_along, reduce_scatter_along
from .linear import Shared2D, vocabulary_layout
from .mesh import SummaMesh

__all__ = ["Embedding2D", "VocabEmbedding2D"]


class Embedding2D(Shared2D):
    """``torch.nn.Embedding`` on a mesh: every rank has all rows, with ``1 / q^2`` of the features.

    Takes ids of any shape, this rank's rows of the batch, or what all ranks have (positions); gives
    ``(..., features / q)``. Forward gathers a column's ``features / q``, which all its ranks look up in.

    Args:
        num_embeddings: rows.
        embedding_dim: features, a multiple of q^2.
        mesh: the ranks that share it.
        padding_idx: a row without a gradient.
        device, dtype: of the parameters.
    """

    dense_type = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: SummaMesh,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype), mesh)

    @classmethod
    def from_dense(cls, dense: nn.Embedding, mesh: SummaMesh) -> Embedding2D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Embedding, mesh: SummaMesh) -> None:
        check_embedding(dense)
        self.mesh, self.padding_idx = mesh, dense.padding_idx
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self._hold(dense, {"weight": self._layout()})

    def _layout(self) -> ParameterLayout:
        mesh = self.mesh
        check_divides(f"{type(self).__name__}: embedding_dim", self.embedding_dim, (mesh.col, mesh.row))
        shape = (self.num_embeddings, self.embedding_dim)
        return ParameterLayout(shape, ((), (mesh.col, mesh.row)), mesh.copies)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_ids(f"{type(self).__name__}: ids", input, self.num_embeddings)
        rows = gather_along(self.weight, self.mesh.row, 1, gradients="summand")
        return nn.functional.embedding(input, rows, self.padding_idx)

    def to_dense(self) -> nn.Embedding:
        """The whole layer, on all ranks; collective."""
        shape = (self.num_embeddings, self.embedding_dim)
        dense = nn.Embedding(*shape, padding_idx=self.padding_idx, device="meta")
        self._give(dense)
        return dense

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class VocabEmbedding2D(Embedding2D):
    """The same split by vocabulary over ``mesh.row`` and by features over ``mesh.col``.

    Takes ids ``(batch / q, ...)`` and gives ``(batch / q, ..., features / q)``. A column gathers its ids;
    each of its ranks looks up those of its rows; the sums go back to where the ids came from.

    Args: as of :class:`Embedding2D`. ``num_embeddings`` is padded to a multiple of q^2; ``embedding_dim`` is
        a multiple of q.
    """

    def _layout(self) -> ParameterLayout:
        check_divides("VocabEmbedding2D: embedding_dim", self.embedding_dim, (self.mesh.col,))
        return vocabulary_layout(self.num_embeddings, self.embedding_dim, self.mesh)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_ids("VocabEmbedding2D: ids", input, self.num_embeddings)
        row = self.mesh.row
        ids = row.all_gather(input, 0)
        found = masked_lookup(ids, self.weight, row.index * self.weight.shape[0], self.padding_idx)
        return reduce_scatter_along(found, row, 0)
