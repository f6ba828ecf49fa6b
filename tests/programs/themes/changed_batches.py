"""Steps that change their batch in place: the root, or a block that is handed a part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock

ON_RANKS = {"stages": (1, 2, 3), "ranks": (2,), "microbatches": 4}


class Adding(nn.Module):
    """Adds its second argument, and counts up in that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x)) + y
        y.add_(1.0)
        return h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.add, self.after = TanhBlock(), Adding(), TanhBlock()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(self.add(self.before(x), y)) + y


def looked_at(smp: Any, out: Any, net: nn.Module, function: Any, shared: bool = False) -> None:
    """Trains, and hands over what the batch is after each step; ``shared``: both tensors are one."""
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = smp.step(function)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, 6, generator=generator)
        y = x if shared else torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        out.value("batch", [x, y])
        optimizer.step()
    out.model(model)


def plainly(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x * 1.0, y).square().mean()
    model.backward(loss)
    return loss


@program(**ON_RANKS)
def by_a_block(smp: Any, out: Any) -> None:
    """Each microbatch changes its own rows."""
    looked_at(smp, out, Net(), plainly)


@program(**ON_RANKS)
def by_a_block_in_a_shared_batch(smp: Any, out: Any) -> None:
    """The rows are those of the first tensor too."""
    looked_at(smp, out, Net(), plainly, shared=True)


@program(**ON_RANKS)
def by_a_block_in_columns(smp: Any, out: Any) -> None:
    """What the block gets is a part of the microbatch's rows."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y[:, 1].unsqueeze(1)).square().mean()
        model.backward(loss)
        return loss + y.mean()

    looked_at(smp, out, Net(), step)


@program(**ON_RANKS)
def by_a_block_for_all(smp: Any, out: Any) -> None:
    """What is not split is one tensor: each microbatch goes on with what the one before has left."""
    model = smp.DistributedModel(Net())
    step = smp.step(plainly, non_split_inputs=["y"])
    total = torch.zeros(2, 6)
    for number in range(2):
        out.value("loss", step(model, torch.full((8, 6), number + 1.0), total).reduce_mean())
        out.value("batch", total)
    out.model(model)


@program(**ON_RANKS)
def by_the_root(smp: Any, out: Any) -> None:
    """With numbers of its own before the model, and with results of the model."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        y[:, :2].mul_(0.5)
        h = model(x, y.clone())
        with torch.no_grad():
            y[1:].copy_(h[:-1])
            y[:, 3].add_(h.mean())
        loss = (h + y).square().mean()
        model.backward(loss)
        return loss

    looked_at(smp, out, Net(), step)
