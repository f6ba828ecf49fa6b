"""Embeddings on a 3D mesh: split by features, or by vocabulary too."""

from __future__ import annotations

import torch
from torch import nn

from ..grid.checks import check_divides, check_ids
from ..grid.lookup import check_embedding, masked_lookup
from ..layout import ParameterLayout
from ..one_d.operations import gather_along, reduce_scatter_along
from .layout import Layout3D, check_layout
from .linear import Shared3D, vocabulary_layout
from .mesh import Mesh3D

__all__ = ["Embedding3D", "VocabEmbedding3D"]


class Embedding3D(Shared3D):
    """``torch.nn.Embedding`` on a mesh: every rank has all rows, with ``1 / d`` of the features, as d^2 ranks
    have them.

    Takes ids of any shape, this rank's rows of the batch in ``layout``, or what all ranks have (positions);
    gives ``(..., features / d)`` of that layout.

    Args:
        num_embeddings: rows.
        embedding_dim: features, a multiple of d.
        mesh: the ranks that share it.
        layout: of ids and result.
        padding_idx: a row without a gradient.
        device, dtype: of the parameters.
    """

    dense_type = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._take(dense, mesh, layout)

    @classmethod
    def from_dense(cls, dense: nn.Embedding, mesh: Mesh3D, layout: Layout3D | str) -> Embedding3D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh, layout)
        return layer

    def _take(self, dense: nn.Embedding, mesh: Mesh3D, layout: Layout3D | str) -> None:
        check_embedding(dense)
        self._place(mesh, layout, swaps=False)
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.padding_idx = dense.padding_idx
        check_divides(f"{type(self).__name__}: embedding_dim", dense.embedding_dim, (self._over[2],))
        self._hold(dense, {"weight": self._layout()})

    def _layout(self) -> ParameterLayout:
        i, r, c = self._over
        return ParameterLayout((self.num_embeddings, self.embedding_dim), ((), (c,)), (i, r))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_layout(type(self).__name__, input, self.takes)
        check_ids(f"{type(self).__name__}: ids", input, self.num_embeddings)
        return self._given(self._look_up(input))

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight, self.padding_idx)

    def to_dense(self) -> nn.Embedding:
        """The whole layer, on all ranks; collective."""
        shape = (self.num_embeddings, self.embedding_dim)
        dense = nn.Embedding(*shape, padding_idx=self.padding_idx, device="meta")
        self._give(dense)
        return dense


class VocabEmbedding3D(Embedding3D):
    """The same with ``1 / d^2`` of the rows on each rank. Takes ids ``(batch / d^2, ...)``.

    With rows of the batch over axes (i, r): the weight is gathered over i, to ``1 / d`` of the vocabulary;
    ids are gathered over r; each rank looks up those of its words; the sums go back to where the ids came
    from.

    Args: as of :class:`Embedding3D`. ``num_embeddings`` is padded to a multiple of d^2.
    """

    def _layout(self) -> ParameterLayout:
        return vocabulary_layout(self.num_embeddings, self.embedding_dim, self)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        i, r, _ = self._over
        words = gather_along(self.weight, i, 0, gradients="summand")
        found = masked_lookup(r.all_gather(ids, 0), words, r.index * words.shape[0], self.padding_idx)
        return reduce_scatter_along(found, r, 0)
