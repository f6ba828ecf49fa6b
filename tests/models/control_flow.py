"""Models whose Python decides what runs: reuse, branches, loops, skipped layers, selected rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case
from tests.models.layers import (
    LENGTH,
    WIDTH,
    MLPBlock,
    mlp_blocks,
    random_generator,
    regression_batch,
)

__all__ = ["CASES"]


class Reuse(nn.Module):
    """Calls one module three times, other modules in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = MLPBlock()
        self.between = mlp_blocks(3)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.between:
            x = x + self.shared(x)
            x = x + block(x)
        return self.head(x)


class Branches(nn.Module):
    """Two branches that do not need each other, then a join."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left = mlp_blocks(2)
        self.right = mlp_blocks(2)
        self.join = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = x, x
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        return self.join(left, right) + left * right


class DataBranch(nn.Module):
    """The sign of an activation's mean decides between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.positive = MLPBlock()
        self.negative = MLPBlock()
        self.blocks = mlp_blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.positive(x) if x.mean() > 0 else x - self.negative(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def signed_batch(num_samples: int) -> Batch:
    """Pairs of samples of alternating sign: a model linear in ``x`` branches both ways."""
    batch = regression_batch(num_samples)
    signs = 1.0 - 2.0 * (torch.arange(num_samples) // 2 % 2)
    return {"x": batch["x"].abs() * signs[:, None], "target": batch["target"]}


class DataLoop(nn.Module):
    """An activation's size, read by ``.item()``, is the number of rounds over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = mlp_blocks(4)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        num_rounds = min(1 + int(x.abs().mean().item() * 4), 7)
        for round_index in range(num_rounds):
            x = x + self.blocks[round_index % len(self.blocks)](x)
        return self.head(x)


def growing_batch(num_samples: int) -> Batch:
    """Samples that grow from small to large, so that microbatches loop differently often."""
    batch = regression_batch(num_samples)
    sizes = torch.linspace(0.1, 4.0, num_samples)
    return {"x": batch["x"] * sizes[:, None], "target": batch["target"]}


class LayerDrop(nn.Module):
    """``torch.rand`` in the root's forward decides which blocks a microbatch skips."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(6)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.25:
                continue
            x = x + block(x)
        return self.head(x)


class SelectRows(nn.Module):
    """Keeps the positions that the batch's own mask names: a shape that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Maps ``[B, T, W]`` and bool ``[B, T]`` to ``[number of True, W]``."""
        for block in self.blocks[:2]:
            x = x + block(x)
        rows = x[mask]
        for block in self.blocks[2:]:
            rows = rows + block(rows)
        return self.head(rows)


class SelectActivations(nn.Module):
    """Keeps the positions whose activation is positive: no process knows how many beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = mlp_blocks(3)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, T, W]`` to ``[B, W]``."""
        x = self.stem(x)
        keep = x[..., 0] > 0
        rows = x[keep]
        for block in self.blocks:
            rows = rows + block(rows)
        x = torch.zeros_like(x).masked_scatter(keep[..., None], rows)
        return self.head(x.mean(dim=1))


def sequence_batch(num_samples: int) -> Batch:
    """``x`` and ``target`` ``[num_samples, T, W]`` and a mask that keeps 1 to T positions."""
    generator = random_generator()
    shape = (num_samples, LENGTH, WIDTH)
    num_kept = 1 + torch.arange(num_samples) % LENGTH
    return {
        "x": torch.randn(shape, generator=generator),
        "target": torch.randn(shape, generator=generator),
        "mask": torch.arange(LENGTH) < num_kept[:, None],
    }


def selected_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["mask"]), batch["target"][batch["mask"]])


def pooled_batch(num_samples: int) -> Batch:
    batch = sequence_batch(num_samples)
    return {"x": batch["x"], "target": batch["target"][:, 0]}


CASES = (
    Case("reuse", Reuse, regression_batch, "one module called three times"),
    Case("branches", Branches, regression_batch, "two branches that join"),
    Case("data_branch", DataBranch, signed_batch, "`if tensor:` on an activation"),
    Case(
        "data_loop",
        DataLoop,
        growing_batch,
        "a loop as long as `.item()` says; blocks run a different number of times",
    ),
    Case("layer_drop", LayerDrop, regression_batch, "random numbers drawn by the root's own code"),
    Case(
        "index_boolean",
        SelectRows,
        sequence_batch,
        "x[mask] with a mask from the batch",
        selected_loss,
    ),
    Case(
        "index_activations",
        SelectActivations,
        pooled_batch,
        "x[x > 0] and masked_scatter: the mask too is an activation",
    ),
)
