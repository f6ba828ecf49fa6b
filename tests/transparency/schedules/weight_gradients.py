"""What tests of split weight gradients have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.runtime.weights.deferral import WeightGradients
from tests.models import Batch
from tests.models.layers import regression_batch
from tests.transparency.ranks import compare_replicas

__all__ = [
    "BATCH",
    "Around",
    "Check",
    "Unseen",
    "all_but_norms",
    "own_names",
    "replicas",
    "split_names",
    "train",
    "zigzag_step",
]

BATCH = regression_batch(8)

Check = Callable[..., set[str]]
"""``check(build)`` compares three steps with plain torch, and gives the names of what was split."""


def train(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["target"])
    backward(loss)
    return loss


def split_names(model: smp.DistributedModel) -> set[str]:
    """The parameters that this process splits."""
    assert model.runtime is not None
    found = set()
    for executor in model.runtime.executors.values():
        assert executor.weights is not None
        found |= {model.runtime.placement.alias(p) for p in executor.weights.learned}
    return found


def all_but_norms(build: Callable[[], nn.Module]) -> set[str]:
    """A norm's gradients are made in one go."""
    return {name for name, _ in build().named_parameters() if ".norm." not in name}


def own_names(found: set[str]) -> set[str]:
    """Of parameters in blocks, without the block."""
    return {name.split(".", 2)[2] for name in found}


class Around(nn.Module):
    """Blocks of one kind in the chain's places."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def zigzag_step(module: Any) -> tuple[smp.DistributedModel, Callable[[Batch], Any]]:
    """A model whose blocks lie on the stages in turn, and a step function that trains it."""
    model = smp.DistributedModel(module)
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index % 2)

    @smp.step
    def step(model: Any, batch: Batch) -> Any:
        return train(model, batch, model.backward)

    return model, lambda batch: step(model, batch)


class Unseen(torch.autograd.Function):
    """Uses a weight where no function mode looks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), (gradient * x).sum().expand_as(weight)


def replicas(num_steps: int) -> tuple[list[str], int, int]:
    """Two stages and two replicas, in each rank.

    Returns:
        What is wrong; how many buckets were reduced while the last step ran; and from how many calls its
        actions of their own have given gradients.
    """
    num_calls: list[int] = []
    run = WeightGradients.run

    def counting(weights: WeightGradients, m: int, visit: int) -> None:
        num_calls.append(len(weights._uses.get((m, visit), ())))
        run(weights, m, visit)

    WeightGradients.run = counting
    try:
        _, wrong, num_started = compare_replicas("gpt", num_steps=num_steps, bucket_cap_mb=0.0005)
    finally:
        WeightGradients.run = run
    num_last = len(num_calls) // num_steps
    return wrong, num_started, sum(num_calls[-num_last:])
