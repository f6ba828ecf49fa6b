"""A byte-level GPT: the decoder-only transformer in its plain form, to be read in one sitting.

Bytes are the vocabulary, so there is no tokenizer to train or to download: any file is text.
Blocks are pre-norm (normalise, transform, add), as in GPT-2 (Radford et al., 2019), because that
trains without a warm-up. Weights start as GPT-2's do: N(0, 0.02), and smaller by
sqrt(2 * num_blocks) where a branch is added to the residual stream, so that the stream's variance
does not grow with depth.

Shapes: B samples, T positions, D = d_model, H heads, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Block", "CausalSelfAttention"]


class CausalSelfAttention(nn.Module):
    """Lets each position read itself and the positions before it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(
                f"d_model={d_model} is not divisible by num_heads={num_heads}: "
                "each head takes an equal slice of the width"
            )
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to ``[B, T, D]``."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, D / H]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One transformer block: attention across positions, then an MLP within each position."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = CausalSelfAttention(d_model, num_heads)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(),
            nn.Linear(4 * d_model, d_model),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte at every position.

    Args:
        vocab_size: V, the number of distinct tokens; 256 for bytes.
        d_model: D, the width of the residual stream.
        num_blocks: how many transformer blocks.
        num_heads: H, attention heads in a block; must divide ``d_model``.
        context: the longest T the learned positions reach.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        d_model: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        context: int = 64,
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(context, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

        self.apply(_initialise)
        for block in self.blocks:
            for branch_output in (block.attention.output, block.mlp[-1]):
                nn.init.normal_(branch_output.weight, std=0.02 / (2 * num_blocks) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps int64 tokens ``[B, T]`` to logits ``[B, T, V]``.

        Raises:
            ValueError: T is longer than ``context``.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"{length} tokens do not fit context={self.context}: pass fewer, or build the "
                "model with a longer context"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
