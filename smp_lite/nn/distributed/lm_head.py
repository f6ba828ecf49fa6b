"""``smp.nn.DistributedTransformerLMHead``: embeddings, transformer and language-model head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from .base import DistributedModule
from .scores import additive
from .transformer import DistributedTransformer
from .vocabulary import VocabularyEmbedding, VocabularyHead, VocabularyLoss, WholeLogits, next_token_loss

__all__ = ["DistributedTransformerLMHead"]


class DistributedTransformerLMHead(DistributedModule):
    """A language model on a :class:`DistributedTransformer`.

    Takes one tuple: ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``, or with
    ``add_cross_attention`` ``(input_ids, attention_mask, token_type_ids, position_ids, cross_states,
    cross_mask, labels)``. Ids, positions and labels are ``(N, S)``, each but the first may be None, and what
    is missing at the end of the tuple is None. A mask is ``(N, S)`` with 1 for what may be attended to, or
    numbers to add ``(N, 1, 1, S)``; SMP's reference documents the reverse of the former for this one module.

    Returns logits ``(N, S, vocab_size)``; without a head hidden ``(N, S, H)``; with labels the loss: cross
    entropy of each token's label, or with a causal mask of the next token's, where labels of -100 do not
    count. Scripts of SMP join microbatches of such logits along dimension 1; here the batch is dimension 0 as
    it is everywhere.

    Parts: ``word_embedding``, ``position_embedding``, ``token_type_embedding``, ``transformer``,
    ``layernorm`` (with ``pre_layernorm`` alone, whose last layer leaves its output as it is) and ``lm_head``,
    whose weight is that of ``word_embedding``. But for the transformer they are whole on every rank, unless
    ``distribute_embedding`` splits the vocabulary. Then a loss is computed without bringing logits
    together, which happens only where they are returned.

    Args:
        num_layers, vocab_size: as they say.
        num_positions: of learned positions; 0: there are none.
        num_token_types: of learned token types; 0: there are none.
        add_lm_head: False: no logits.
        embedding_dropout_prob: of the embeddings' sum; None: ``hidden_dropout_prob``.
        distribute_embedding: split ``word_embedding`` and ``lm_head`` by the vocabulary, with zero rows at
            the end where it does not divide; positions and token types stay whole.
        tie_input_output_embedding: False: ``lm_head`` has a weight of its own.
        use_lm_head_bias: whether ``lm_head`` has a bias.
        return_logits: with labels ``(loss, logits)``.
        others: of :class:`DistributedTransformer`.

    Raises:
        SMPError: ``smp.init()`` was not called; in forward, positions for rotary ones.
        CannotShare: the ranks cannot share heads or features equally.
        ValueError: numbers or switches that do not fit; in forward, another tuple.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        embedding_dropout_prob: float | None = None,
        distribute_embedding: bool = False,
        tie_input_output_embedding: bool = True,
        use_lm_head_bias: bool = False,
        return_logits: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        self.causal_mask_size, self.add_cross_attention = causal_mask_size, add_cross_attention
        self.rotary = others.get("rotary_dim") is not None
        self.return_logits, self.vocab_size, self.num_positions = return_logits, vocab_size, num_positions
        self.word_embedding = _embedding(vocab_size, hidden_size, initializer_range)
        if num_positions:
            self.position_embedding = _embedding(num_positions, hidden_size, initializer_range)
        if num_token_types:
            self.token_type_embedding = _embedding(num_token_types, hidden_size, initializer_range)
        self.has_token_types = bool(num_token_types)
        self.dropout = nn.Dropout(
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads,
            attention_head_size,
            hidden_size,
            intermediate_size,
            attention_dropout_prob,
            hidden_dropout_prob,
            activation,
            layernorm_epsilon,
            initializer_range,
            use_normal_initialization,
            causal_mask_size,
            add_cross_attention,
            pre_layernorm,
            post_layernorm,
            **others,
        )
        self.ends_normalised = post_layernorm
        if not post_layernorm:
            self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon)
        self.add_lm_head = add_lm_head
        if add_lm_head:
            self.lm_head = nn.Linear(hidden_size, vocab_size, use_lm_head_bias)
            nn.init.normal_(self.lm_head.weight, 0.0, initializer_range)
            if tie_input_output_embedding:
                self.lm_head.weight = self.word_embedding.weight
        self.splits_vocabulary = distribute_embedding and self.region.axis.size > 1
        if self.splits_vocabulary:
            self._split_vocabulary()

    def _split_vocabulary(self) -> None:
        shared: dict[int, nn.Parameter] = {}
        self.word_embedding = VocabularyEmbedding(self.word_embedding, shared)  # type: ignore[assignment]
        if self.add_lm_head:
            self.lm_head = VocabularyHead(self.lm_head, shared)  # type: ignore[assignment]
            # Modules, so that each runs as one call on the stage that has its input.
            self.vocabulary_loss = VocabularyLoss(self.vocab_size, causal=self.causal_mask_size is not None)
            self.whole_logits = WholeLogits(self.vocab_size)

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> Any:
        ids, mask, token_types, positions, cross, cross_mask, labels = self._taken_apart(inputs)
        if positions is not None and self.rotary:
            raise SMPError(
                "DistributedTransformerLMHead: position_ids with rotary_dim are not supported: positions "
                "count from 0 there. Pass None"
            )
        hidden = self.word_embedding(ids)
        if self.num_positions:
            if positions is None:
                positions = torch.arange(ids.shape[-1], device=ids.device).unsqueeze(0)
            hidden = hidden + self.position_embedding(positions)
        elif positions is not None and not self.rotary:
            raise ValueError("DistributedTransformerLMHead: position_ids with num_positions=0")
        if token_types is not None:
            if not self.has_token_types:
                raise ValueError("DistributedTransformerLMHead: token_type_ids with num_token_types=0")
            hidden = hidden + self.token_type_embedding(token_types)
        hidden = self.dropout(hidden)
        wide = _four_dimensions(mask, hidden.dtype)
        if self.add_cross_attention:
            hidden = self.transformer((hidden, cross, wide, _four_dimensions(cross_mask, hidden.dtype)))[0]
        else:
            hidden = self.transformer((hidden, wide))[0]
        if not self.ends_normalised:
            hidden = self.layernorm(hidden)
        if not self.add_lm_head:
            if labels is not None:
                raise ValueError("DistributedTransformerLMHead: labels with add_lm_head=False")
            return hidden
        logits = self.lm_head(hidden)
        if labels is None:
            return self.whole_logits(logits) if self.splits_vocabulary else logits
        if self.splits_vocabulary:
            loss = self.vocabulary_loss(logits, labels)
            return (loss, self.whole_logits(logits)) if self.return_logits else loss
        loss = next_token_loss(logits, labels, causal=self.causal_mask_size is not None)
        return (loss, logits) if self.return_logits else loss

    def _taken_apart(self, inputs: Any) -> tuple[Any, ...]:
        names = ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
        names += ["cross_states", "cross_mask", "labels"] if self.add_cross_attention else ["labels"]
        if not isinstance(inputs, tuple | list) or not 1 <= len(inputs) <= len(names):
            raise ValueError(
                f"DistributedTransformerLMHead takes one tuple ({', '.join(names)}), got "
                f"{type(inputs).__name__}"
                + (f" of {len(inputs)}" if isinstance(inputs, tuple | list) else "")
            )
        given = dict(zip(names, [*inputs, *[None] * (len(names) - len(inputs))], strict=True))
        order = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        return (*map(given.get, order), given.get("cross_states"), given.get("cross_mask"), given["labels"])


def _embedding(num: int, size: int, stddev: float) -> nn.Embedding:
    made = nn.Embedding(num, size)
    nn.init.normal_(made.weight, 0.0, stddev)
    return made


def _four_dimensions(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """``(N, S)`` with 1 for what may be attended to, as numbers to add ``(N, 1, 1, S)``."""
    if mask is None or mask.dim() == 4:
        return mask
    return additive(mask != 0, dtype)[:, None, None, :]  # type: ignore[index]
