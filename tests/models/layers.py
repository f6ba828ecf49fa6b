"""The few layers and batches that the test models share.

`MLPBlock` ends in a Linear layer, whose output no autograd node keeps: a caller may change it in
place without spoiling the block's own backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch

__all__ = [
    "LENGTH",
    "WIDTH",
    "Attention",
    "Chain",
    "MLPBlock",
    "mlp_blocks",
    "random_generator",
    "regression_batch",
    "token_batch",
]

WIDTH = 16
LENGTH = 6


class MLPBlock(nn.Module):
    """Normalises and transforms the last dimension; no residual. ``[..., W]`` to ``[..., W]``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(self.norm(x))))


def mlp_blocks(num_blocks: int) -> nn.ModuleList:
    """A list of `MLPBlock`."""
    return nn.ModuleList(MLPBlock() for _ in range(num_blocks))


class Chain(nn.Module):
    """Residual blocks and a head, ``[..., W]`` to ``[..., W]``: the setting for one difficulty."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = mlp_blocks(num_blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention of ``x`` over ``source`` (itself if None), with a residual.

    Args of forward:
        x: ``[B, T, W]``.
        source: ``[B, S, W]``, or None.
        mask: True where a position may be read, broadcastable to ``[B, heads, T, S]``, or None.
    """

    def __init__(self, width: int = WIDTH, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        query = self._split_heads(self.query(normed))
        keys_values = self.key_value(normed if source is None else source)
        key, value = (self._split_heads(part) for part in keys_values.chunk(2, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.output(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def random_generator(salt: int = 0) -> torch.Generator:
    """A generator of the batch's own, so that making a batch leaves the global stream alone."""
    return torch.Generator().manual_seed(1234 + salt)


def regression_batch(num_samples: int) -> Batch:
    """``x`` and ``target``, both ``[num_samples, WIDTH]``, standard normal."""
    generator = random_generator()
    return {
        "x": torch.randn(num_samples, WIDTH, generator=generator),
        "target": torch.randn(num_samples, WIDTH, generator=generator),
    }


def token_batch(num_samples: int, vocab_size: int = 64, length: int = LENGTH) -> Batch:
    """``tokens`` and ``targets`` ``[num_samples, length]``, and ``lengths`` ``[num_samples]``.

    Lengths count the positions that are no padding; they lie between 2 and ``length`` and differ
    between samples.
    """
    generator = random_generator()
    shape = (num_samples, length)
    return {
        "tokens": torch.randint(1, vocab_size, shape, generator=generator),
        "targets": torch.randint(1, vocab_size, shape, generator=generator),
        "lengths": 2 + torch.arange(num_samples) % (length - 1),
    }
