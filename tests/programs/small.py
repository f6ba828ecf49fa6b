"""A small model, its batches and its step, for programs that are about something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "Net", "NormNet", "TanhBlock", "batches", "make_step", "plain_step", "trained"]


class Block(nn.Module):
    """Residual, with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """``[B, 6]`` to ``[B, 3]``."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NormNet(Net):
    """With batch norm at the entry."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__(width, depth)
        self.stem = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width))


class TanhBlock(nn.Module):
    """``[B, 6]`` to ``[B, 6]``, for programs about what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def plain_step(model: Any, x: Tensor) -> Tensor:
    """The mean square of the result is the loss."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(
    smp: Any,
    out: Any,
    net: nn.Module,
    function: Callable[[Any, Tensor], Tensor] = plain_step,
    steps: int = 2,
    around: Callable[[], Any] = contextlib.nullcontext,
    after_step: Callable[[], Any] = lambda: None,
) -> None:
    """Trains a model of ``[B, 6]`` by the step function; hands over losses and what was trained.

    Args:
        around: a context manager for each call of the step.
        after_step: is called after each.
    """
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = smp.step(function)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        with around():
            out.value("loss", step(model, torch.randn(8, 6, generator=generator)).reduce_mean())
        optimizer.step()
        after_step()
    out.model(model)


def batches(smp: Any, steps: int = 3, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and classes, others on each replica."""
    generator = torch.Generator().manual_seed(9 + smp.dp_rank())
    for _ in range(steps):
        yield torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def make_step(smp: Any) -> Callable[..., Any]:
    """A step of classification; returns the loss."""

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return train_step
