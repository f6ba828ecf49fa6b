"""A vocabulary that the ranks of a sequence share: each holds its part of the words, for all tokens.

As in Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198): tokens are gathered on the way in, and summed up to where they came from on the way out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..grid.checks import check_ids
from ..grid.laid_out import LaidOut
from ..grid.lookup import check_embedding, masked_lookup
from ..layout import ParameterLayout
from ..one_d.operations import gather_along, reduce_scatter_along
from ..one_d.parts import next_multiple
from .mesh import SequenceMesh

__all__ = ["SequenceClassifier", "SequenceVocabEmbedding"]


def _layouts(dense: nn.Module, mesh: SequenceMesh, rows: int) -> dict[str, ParameterLayout]:
    padded = {0: next_multiple(rows, mesh.size)} if rows % mesh.size else {}
    return {
        name: ParameterLayout(
            tuple(parameter.shape), ((mesh.axis,), *((),) * (parameter.dim() - 1)), padded=padded
        )
        for name, parameter in dense._parameters.items()
        if parameter is not None
    }


class SequenceVocabEmbedding(LaidOut):
    """``torch.nn.Embedding``, split by vocabulary over the ranks that share the sequence.

    Takes ids ``(batch, tokens / P)`` and gives ``(batch, tokens / P, features)``.

    Args:
        num_embeddings: padded to a multiple of P.
        embedding_dim: any.
        mesh: the ranks.
        padding_idx: a row without a gradient.
        device, dtype: of the parameters.
    """

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

    @classmethod
    def from_dense(cls, dense: nn.Embedding, mesh: SequenceMesh) -> SequenceVocabEmbedding:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Embedding, mesh: SequenceMesh) -> None:
        check_embedding(dense)
        self.mesh, self.padding_idx = mesh, dense.padding_idx
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self._hold(dense, _layouts(dense, mesh, dense.num_embeddings))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_ids("SequenceVocabEmbedding: ids", input, self.num_embeddings)
        axis = self.mesh.axis
        ids = axis.all_gather(input, 1)
        found = masked_lookup(ids, self.weight, axis.index * self.weight.shape[0], self.padding_idx)
        return reduce_scatter_along(found, axis, 1)

    def to_dense(self) -> nn.Embedding:
        """The whole layer, on all ranks; collective."""
        shape = (self.num_embeddings, self.embedding_dim)
        dense = nn.Embedding(*shape, padding_idx=self.padding_idx, device="meta")
        self._give(dense)
        return dense


class SequenceClassifier(LaidOut):
    """A Linear layer to a vocabulary that is split as that of :class:`SequenceVocabEmbedding`; tie them by
    ``classifier.weight = embedding.weight``.

    Takes ``(batch, tokens / P, features)``. Gives ``(batch, tokens, classes / P)``: this rank's classes for
    all tokens, these rank after rank. The loss (:func:`~smp_lite.nn.sequence.cross_entropy_sequence`) takes
    them with ``vocabulary_split=True``.

    Args:
        in_features: any.
        num_classes: padded to a multiple of P.
        mesh: the ranks.
        bias: whether there is one.
        device, dtype: of the parameters.
    """

    dense_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mesh: SequenceMesh,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype), mesh)

    @classmethod
    def from_dense(cls, dense: nn.Linear, mesh: SequenceMesh) -> SequenceClassifier:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Linear, mesh: SequenceMesh) -> None:
        self.mesh, self.in_features, self.num_classes = mesh, dense.in_features, dense.out_features
        self._hold(dense, _layouts(dense, mesh, dense.out_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(gather_along(input, self.mesh.axis, 1, gradients="summand"), self.weight, self.bias)

    def to_dense(self) -> nn.Linear:
        """The whole layer, on all ranks; collective."""
        dense = nn.Linear(self.in_features, self.num_classes, self.bias is not None, device="meta")
        self._give(dense)
        return dense
