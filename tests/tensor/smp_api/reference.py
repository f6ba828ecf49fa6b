"""A transformer in plain torch, with the parts' names of SMP's, written from its documented semantics."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEADS, HEAD, HIDDEN, INTERMEDIATE, VOCABULARY, LENGTH = 4, 4, 12, 20, 11, 6


class Attention(nn.Module):
    def __init__(self, options: dict[str, Any], *, cross: bool = False) -> None:
        super().__init__()
        self.options, self.cross = options, cross
        inner = HEADS * HEAD
        self.query, self.key, self.value = (nn.Linear(HIDDEN, inner) for _ in range(3))
        self.dense = nn.Linear(inner, HIDDEN)
        if options["pre_layernorm"]:
            self.pre_layernorm = nn.LayerNorm(HIDDEN)
        if options["post_layernorm"]:
            self.layernorm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor, states: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        normed = self.pre_layernorm(x) if self.options["pre_layernorm"] else x
        states = normed if states is None else states
        query, key, value = (
            layer(y).view(*y.shape[:2], HEADS, HEAD).transpose(1, 2)
            for layer, y in ((self.query, normed), (self.key, states), (self.value, states))
        )
        scores = query @ key.mT / math.sqrt(HEAD)
        if self.options["causal_mask_size"] and not self.cross:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        if self.options.get("use_alibi") and not self.cross:
            slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=x.dtype)
            scores = scores + slopes[:, None, None] * torch.arange(1 - key.shape[-2], 1)
        found = self.dense(((scores + mask).softmax(-1) @ value).transpose(1, 2).flatten(2)) + x
        return self.layernorm(found) if self.options["post_layernorm"] else found


class Output(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.dense1, self.dense2 = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        if options["pre_layernorm"]:
            self.pre_layernorm = nn.LayerNorm(HIDDEN)
        if options["post_layernorm"]:
            self.layernorm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.pre_layernorm(x) if self.options["pre_layernorm"] else x
        found = self.dense2(F.gelu(self.dense1(normed))) + x
        return self.layernorm(found) if self.options["post_layernorm"] else found


class Layer(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.attention = Attention(options)
        if options["add_cross_attention"]:
            self.cross_attention = Attention(options, cross=True)
        self.output = Output(options)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.options["add_cross_attention"]:
            x, states, mask, cross_mask = inputs
            x = self.cross_attention(self.attention(x, None, mask), states, cross_mask)
            return self.output(x), states, mask, cross_mask
        x, mask = inputs
        return self.output(self.attention(x, None, mask)), mask


class Transformer(nn.Module):
    """As ``smp.nn.DistributedTransformer`` has its parts."""

    def __init__(self, num_layers: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(*(Layer(options) for _ in range(num_layers)))
        self.normalises = options["pre_layernorm"] and options["post_layernorm"]
        if self.normalises:
            self.pre_layernorm, self.layernorm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.normalises:
            return self.seq_layers(inputs)
        found = self.seq_layers((self.pre_layernorm(inputs[0]), *inputs[1:]))
        return (self.layernorm(found[0]), *found[1:])


class Net(nn.Module):
    """Embeds ids, and runs what is given on them; masks the last token of every other row.

    Args:
        learned: heads of a bias of scores that is trained (1: the same for all); 0: there is none.
    """

    def __init__(self, inner: nn.Module, *, cross: bool = False, part: str = "", learned: int = 0) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner, self.cross, self.part = inner, cross, part
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        if learned:
            self.bias = nn.Parameter(torch.randn(1, learned, LENGTH, LENGTH))
        self.learned = learned

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids) + self.positions(torch.arange(LENGTH)))
        mask = torch.zeros(ids.shape[0], 1, 1, LENGTH, dtype=x.dtype)
        mask = mask.masked_fill((ids[:, -1:] % 2 == 0)[:, None, None] & (torch.arange(LENGTH) == 5), -1e4)
        if self.learned:
            mask = mask + self.bias
        if self.part == "attention":
            x = self.inner(x, None, mask)
        elif self.part == "output":
            x = self.inner(x)
        elif self.cross:
            x = self.inner((x, self.embed(ids.flip(-1)), mask, mask.flip(-1)))[0]
        else:
            x = self.inner((x, mask))[0]
        return self.head(x)
