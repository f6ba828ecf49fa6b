"""Attention of heads that one rank has: scores, masks, positions, softmax, values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...comm.groups.axis import Axis
from .dropout import dropout_of_part

__all__ = ["Scores", "additive", "alibi_bias", "rotated"]


@dataclass(frozen=True)
class Scores:
    """How queries and keys become weights.

    Attributes:
        scale: of the products.
        dropout: of the weights, in training.
        causal: a token attends to itself and those before; ``window`` > 0: to as many, itself among them.
        in_fp32: products and softmax in 32 bits at least.
        layer_scaling: products are divided by this number, and multiplied again in 32 bits (Megatron-LM's
            query-key layer scaling, against overflow in 16 bits).
        uses_sdpa: torch's scaled_dot_product_attention, where nothing is asked for that it has not.
    """

    scale: float
    dropout: float = 0.0
    causal: bool = False
    window: int = 0
    in_fp32: bool = False
    layer_scaling: float = 1.0
    uses_sdpa: bool = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        training: bool,
        axis: Axis,
    ) -> torch.Tensor:
        """``(N, heads, S, d)`` each, and a bias to add to the scores, to ``(N, heads, S, d)``."""
        drops = training and self.dropout > 0.0
        plain = not (self.in_fp32 or self.layer_scaling != 1.0 or drops)
        if self.uses_sdpa and plain:
            return F.scaled_dot_product_attention(
                query, key, value, self._with_causal(bias, query, key), scale=self.scale
            )
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.in_fp32:
            query, key = query.to(wide), key.to(wide)
        scores = (query @ key.mT) * (self.scale / self.layer_scaling)
        if self.layer_scaling != 1.0:
            scores = scores.to(wide) * self.layer_scaling
        combined = self._with_causal(bias, scores, key)
        if combined is not None:
            scores = scores + combined
        weights = scores.softmax(-1).to(value.dtype)
        return dropout_of_part(weights, self.dropout, training, axis) @ value

    def _with_causal(
        self, bias: torch.Tensor | None, like: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        if not self.causal:
            return bias
        rows, columns = like.shape[-2], key.shape[-2]
        i = torch.arange(rows, device=like.device).unsqueeze(-1)
        j = torch.arange(columns, device=like.device)
        hidden = j > i
        if self.window:
            hidden = hidden | (j <= i - self.window)
        causal = torch.zeros(rows, columns, dtype=like.dtype, device=like.device)
        causal = causal.masked_fill(hidden, torch.finfo(like.dtype).min)
        if bias is None:
            return causal
        # Not their sum, which would overflow where both say no.
        return torch.maximum(bias + causal, causal.new_tensor(torch.finfo(like.dtype).min))


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as numbers of this dtype to add; True or 1 of a bool or integer mask: attend."""
    if mask is None:
        return None
    if mask.is_floating_point():
        return mask if mask.dtype is dtype else mask.clamp(min=torch.finfo(dtype).min).to(dtype)
    hidden = mask == 0
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        hidden, torch.finfo(dtype).min
    )


def alibi_bias(num_heads: int, length: int, max_bias: float, like: torch.Tensor) -> torch.Tensor:
    """``(1, num_heads, 1, length)``: of key j, slope times (j - length + 1) (Press et al. 2022, "ALiBi").

    Args:
        max_bias: head h, counted from 1, has the slope 2 ** (-h * max_bias / num_heads).
        like: gives dtype and device.
    """
    numbers = torch.arange(1, num_heads + 1, dtype=torch.float64, device=like.device)
    slopes = 2.0 ** (-numbers * max_bias / num_heads)
    distance = torch.arange(1 - length, 1, dtype=torch.float64, device=like.device)
    return (slopes.unsqueeze(-1) * distance).to(like.dtype).reshape(1, num_heads, 1, length)


def rotated(x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Rotary positions on the first ``rotary_dim`` features of ``(N, heads, S, d)``, neighbouring features
    in pairs, as GPT-J has them (Su et al. 2021, "RoFormer")."""
    length = x.shape[-2]
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=x.device) / rotary_dim
    angles = torch.arange(length, dtype=torch.int64, device=x.device).float()[:, None] * (1.0 / 10000**powers)
    sin = angles.sin().to(x.dtype).repeat_interleave(2, -1)
    cos = angles.cos().to(x.dtype).repeat_interleave(2, -1)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    return torch.cat([turned * cos + pairs * sin, rest], -1)
