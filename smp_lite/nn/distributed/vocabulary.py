"""The ends of a language model split by the vocabulary (Shoeybi et al. 2019, "Megatron-LM", section 3).

A rank has its equal part of the rows of the embedding and of the head, with zero rows at the end where the
vocabulary does not divide. Outside these modules activations lie as they do outside blocks: ``(B, S, H)`` on
each rank, of a batch of its own or of one that all share (:mod:`.region`). Where ranks have batches of their
own, the rows of all meet here: T * B of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..one_d.cross_entropy import vocab_parallel_cross_entropy
from ..one_d.embedding import check_indices
from ..one_d.operations import (
    copy_to_ranks,
    gather_along,
    reduce_scatter_along,
    split_along,
    sum_over_ranks,
)
from ..one_d.parts import layout_over, next_multiple
from .base import DistributedModule
from .region import Region, all_to_all

__all__ = ["VocabularyEmbedding", "VocabularyHead", "VocabularyLoss", "WholeLogits", "next_token_loss"]

_IGNORED = -100


class VocabularyEmbedding(DistributedModule):
    """``torch.nn.Embedding`` with this rank's rows: ids ``(B, ...)`` to ``(B, ..., H)``.

    Args:
        dense: whose rows are split; its weight may be another module's too, see ``shared``.
        shared: parts by the identity of their dense parameter.

    Raises:
        IndexError: in forward, on all ranks: an id is not in the vocabulary.
    """

    def __init__(self, dense: nn.Embedding, shared: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.weight = dense.weight
        _keep_rows(self, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        region, axis = self.region, self.region.axis
        self.meet(input)
        ids = axis.all_gather(input, 0) if region.own_batches else input
        check_indices(ids, self.num_embeddings, "DistributedTransformerLMHead: id")
        rows = self.weight.shape[0]
        first = rows * axis.index
        elsewhere = (ids < first) | (ids >= first + rows)
        found = F.embedding((ids - first).masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_scatter_along(found, axis, 0) if region.own_batches else sum_over_ranks(found, axis)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.region.axis.size}"


class VocabularyHead(DistributedModule):
    """``torch.nn.Linear`` with this rank's classes: hidden ``(B, S, H)`` to logits ``(N, S, padded / T)`` of
    all N rows, which :class:`VocabularyLoss` and :class:`WholeLogits` take.

    Args:
        dense, shared: as of :class:`VocabularyEmbedding`.
    """

    def __init__(self, dense: nn.Linear, shared: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.weight, self.bias = dense.weight, dense.bias
        _keep_rows(self, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        region, axis = self.region, self.region.axis
        self.meet(input)
        if region.own_batches:
            hidden = gather_along(input, axis, 0, gradients="summand")
        else:
            hidden = copy_to_ranks(input, axis)
        return F.linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.region.axis.size}"


class VocabularyLoss(nn.Module):
    """Cross entropy of what :class:`VocabularyHead` gives, and this rank's labels ``(B, S)``: the mean over
    its own rows' labels, as :func:`next_token_loss` takes it.

    Args:
        vocab_size: without padding.
        causal: whether labels are of the next token.
    """

    def __init__(self, vocab_size: int, *, causal: bool) -> None:
        super().__init__()
        self.vocab_size, self.causal, self.region = vocab_size, causal, Region.of_session()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        region, axis = self.region, self.region.axis
        labels = _shifted(labels) if self.causal else labels
        region.meet("the loss over a split vocabulary", labels)
        all_labels = axis.all_gather(labels, 0) if region.own_batches else labels
        losses = vocab_parallel_cross_entropy(
            _wide(logits),
            all_labels,
            axis=axis,
            vocab_size=self.vocab_size,
            ignore_index=_IGNORED,
            reduction="none",
        )
        if region.own_batches:
            losses = split_along(losses, axis, 0)
        return losses.sum() / (labels != _IGNORED).sum()


class WholeLogits(nn.Module):
    """Of what :class:`VocabularyHead` gives, the logits ``(B, S, vocabulary)`` of this rank's own rows."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.region = vocab_size, Region.of_session()

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        region, axis = self.region, self.region.axis
        if region.own_batches:
            found = all_to_all(logits, axis, 0, -1)
        else:
            found = gather_along(logits, axis, -1, gradients="same")
        return found.narrow(-1, 0, self.vocab_size)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Cross entropy of whole logits ``(N, S, vocabulary)``: the mean over labels that are not -100, in 32
    bits at least.

    Args:
        labels: ``(N, S)``; of each token itself, or with ``causal`` of the next one.
    """
    labels = _shifted(labels) if causal else labels
    return F.cross_entropy(
        _wide(logits).reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=_IGNORED
    )


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _keep_rows(module: DistributedModule, shared: dict[int, nn.Parameter]) -> None:
    axis = module.region.axis
    module.keep_parts(
        {
            name: layout_over(parameter, axis, 0, padded=next_multiple(parameter.shape[0], axis.size))
            for name, parameter in module._parameters.items()
            if parameter is not None
        },
        shared,
    )
