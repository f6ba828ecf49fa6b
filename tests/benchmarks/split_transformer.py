"""The transformer of the tensor tables, and how each way of splitting it is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp_lite.nn.one_d import Attention, VocabParallelCrossEntropy
from smp_lite.nn.sequence import cross_entropy_sequence
from smp_lite.nn.three_d import Layout3D, cross_entropy_3d
from smp_lite.nn.two_d import cross_entropy_2d
from smp_lite.systems.colossal import tensor_mesh
from tests.tensor.colossal_cases import OfWholeBatches, split_1d
from tests.tensor.grid import cases_2d, cases_3d
from tests.tensor.sequence import cases as cases_sequence

__all__ = ["Split", "SplitWorkload", "Transformer", "optimizer_of"]

_RATE = 3e-3


class Block(nn.Module):
    """One layer of it. The attention is dense: over one rank."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features, heads, causal=True, bias=False)
        self.norm2 = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, features]`` to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks of norm, attention, norm and MLP, and a head with the weight of the embedding."""

    def __init__(self, words: int, tokens: int, features: int, heads: int, num_blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, features)
        self.positions = nn.Embedding(tokens, features)
        self.blocks = nn.ModuleList(Block(features, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[B, T, words]`` of ids ``[B, T]`` and positions ``[T]``."""
        x = self.words(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


@dataclass(frozen=True)
class Split:
    """A way of splitting a model over ranks: a mode of Colossal-AI's, or ``sharded`` (ZeRO-3)."""

    mode: str
    ranks: int
    depth: int | None = None

    def __str__(self) -> str:
        return self.mode if self.depth is None else f"{self.mode}, depth {self.depth}"

    @property
    def has_own_batches(self) -> bool:
        """Whether each rank has a share of the batch, and no part of it is said to a layer."""
        return self.mode == "sharded"

    def config(self, model: nn.Module) -> dict[str, Any]:
        """Colossal-AI's ``parallel``, or torchprime's mesh with every parameter of the model on it."""
        if self.mode != "sharded":
            depth = {} if self.depth is None else {"depth": self.depth}
            return {"parallel": {"tensor": {"size": self.ranks, "mode": self.mode, **depth}}}
        rules = {
            re.sub(r"\.\d+\.", ".*.", name): ["fsdp", *[None] * (parameter.dim() - 1)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        return {"ici_mesh": {"fsdp": self.ranks}, "sharding": rules}


@dataclass(frozen=True)
class SplitWorkload:
    """A transformer and the batch of all ranks together."""

    features: int
    heads: int
    num_blocks: int
    tokens: int
    batch_size: int
    words: int = 512

    def __str__(self) -> str:
        return (
            f"d {self.features}, {self.num_blocks} blocks, {self.words} words, T {self.tokens}, "
            f"B {self.batch_size}"
        )

    def dense(self) -> Transformer:
        """The same weights at every call."""
        torch.manual_seed(0)
        return Transformer(self.words, self.tokens, self.features, self.heads, self.num_blocks)

    def batch(self) -> tuple[Tensor, Tensor]:
        """(ids, targets), int64 ``[B, T]``; the same values at every call."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.batch_size, self.tokens)
        ids, targets = torch.randint(self.words, shape, generator=generator).unbind()
        return ids, targets

    def positions(self) -> Tensor:
        """Of all tokens."""
        return torch.arange(self.tokens)

    def dense_loss(self, model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        return F.cross_entropy(model(ids, self.positions()).flatten(0, 1), targets.flatten())

    def split(self, split: Split) -> tuple[nn.Module, Callable[..., Tensor]]:
        """(this rank's part of the model, its loss of (model, ids, targets)); in a session of its
        configuration."""
        dense = self.dense()
        if split.mode == "sharded":
            return dense, self.dense_loss
        mesh = tensor_mesh()
        if split.mode == "1d":
            loss_1d = VocabParallelCrossEntropy(axis=mesh, vocab_size=self.words)
            model = OfWholeBatches(split_1d(dense, mesh), lambda ids: ids, self.positions)
            return model, lambda model, ids, targets: loss_1d(model(ids), targets)
        if split.mode == "3d":
            net = cases_3d.split_transformer(dense, mesh, Layout3D.IN)
            model = OfWholeBatches(net, lambda ids: mesh.split_batch(ids, "in"), self.positions)
            return model, lambda model, ids, targets: cross_entropy_3d(
                model(ids), mesh.split_batch(targets, "out"), mesh, "out", self.words
            )
        if split.mode == "sequence":
            net = cases_sequence.split_transformer(dense, mesh, "ring", True)
            model = OfWholeBatches(net, mesh.split_batch, lambda: mesh.positions(self.tokens))
            return model, lambda model, ids, targets: cross_entropy_sequence(
                model(ids), mesh.split_batch(targets), mesh, self.words, vocabulary_split=True
            )
        model = OfWholeBatches(cases_2d.split_transformer(dense, mesh), mesh.split_batch, self.positions)
        return model, lambda model, ids, targets: cross_entropy_2d(
            model(ids), mesh.split_batch(targets), mesh, self.words
        )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW. A large eps: it divides by gradients that may be nothing but rounding."""
    return torch.optim.AdamW(parameters, lr=_RATE, eps=1e-4)
