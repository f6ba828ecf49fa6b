"""``smp.nn.FlashAttentionLayer``: attention of queries, keys and values that are there already."""

from __future__ import annotations

import torch
from torch import nn

from ..one_d.parts import ONE_RANK
from .scores import Scores, additive, alibi_bias

__all__ = ["FlashAttentionLayer"]


class FlashAttentionLayer(nn.Module):
    """Attention under SMP's name and with its arguments; torch's fused kernel where no weight is dropped.

    Args:
        attention_dropout_prob: of the weights, in training.
        attention_head_size: d; needed to scale by it.
        scale_attention_scores: by 1 / sqrt(d).
        scale_attn_by_layer_idx: by 1 / (layer_idx + 1) as well.
        layer_idx: number of the layer, from 0.
        scale: this number instead of all that.
        triton_flash_attention: which kernel; without effect.
        use_alibi: biases of distance, with a largest exponent of 8 (Press et al. 2022).

    Raises:
        ValueError: a scale needs ``attention_head_size`` or ``layer_idx``, and it is missing.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise ValueError(
                        "FlashAttentionLayer: scale_attention_scores=True needs attention_head_size, or scale"
                    )
                scale = attention_head_size**-0.5
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise ValueError("FlashAttentionLayer: scale_attn_by_layer_idx=True needs layer_idx")
                scale /= layer_idx + 1
        self.scale, self.attention_dropout_prob, self.use_alibi = scale, attention_dropout_prob, use_alibi

    def forward(
        self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """
        Args:
            qkv: ``(B, S, 3, heads, d)``.
            attn_mask: broadcasts to ``(B, heads, S, S)``: numbers to add, or bool, True for what may be
                attended to.
            causal: a token attends to itself and those before.

        Returns:
            ``(B, heads, S, d)``.

        Raises:
            ValueError: another shape.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"FlashAttentionLayer takes (batch, sequence, 3, heads, head size), got {list(qkv.shape)}"
            )
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        bias = additive(attn_mask, qkv.dtype)
        if self.use_alibi:
            heads = qkv.shape[3]
            alibi = alibi_bias(heads, qkv.shape[1], 8.0, qkv)
            bias = alibi if bias is None else bias + alibi
        scores = Scores(self.scale, self.attention_dropout_prob, causal=causal, uses_sdpa=True)
        return scores.attend(query, key, value, bias, training=self.training, axis=ONE_RANK)
