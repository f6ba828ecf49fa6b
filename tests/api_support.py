"""What the tests of the public functions train: a net small enough to name every part of it.

Nothing here is about exactness of models (the transparency tests are); the net only has to have a
parameter and a buffer on each of two stages, an optimizer with state, and a plain twin to compare
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp

__all__ = [
    "NUM_MICROBATCHES",
    "Net",
    "batch",
    "build",
    "in_memory",
    "place",
    "plain_train",
    "same",
    "train",
    "wrap",
]

NUM_MICROBATCHES = 2


class Net(nn.Module):
    """Two blocks with a batch norm each; buffers and parameters on both sides of the cut."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))
        self.last = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def build(seed: int = 7) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(index: int = 0, samples: int = 4) -> tuple[Tensor, Tensor]:
    """(inputs [samples, 4], targets [samples, 1]); the same index gives the same values."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)


@smp.step
def train(model: Any, x: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), target)
    model.backward(loss)
    return loss


def plain_train(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The same step by plain torch; losses [NUM_MICROBATCHES], gradients left in the parameters."""
    losses = []
    for part, wanted in zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True):
        loss = F.mse_loss(model(part), wanted)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def in_memory(partitions: int = 2, **parameters: Any) -> None:
    """Starts a session in which this process plays all stages."""
    smp.init_in_memory({"partitions": partitions, "microbatches": NUM_MICROBATCHES, **parameters})


def place(stage_of: Callable[[str], int], module: nn.Module) -> None:
    """`smp.set_partition` for each module by its qualified name."""
    for name, part in module.named_modules():
        smp.set_partition(part, stage_of(name))


def wrap(
    module: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[Any, Any]:
    """(DistributedModel, DistributedOptimizer), cut between `first` and `last` in manual mode."""
    model = smp.DistributedModel(module)
    if not smp.state.cfg.auto_partition:
        place(lambda name: int(name.startswith("last")), module)
    return model, smp.DistributedOptimizer(optimizer(model.parameters()))


def same(first: Any, second: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal to the bit."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor)
        return both and torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
