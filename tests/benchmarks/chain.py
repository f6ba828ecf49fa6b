"""A chain of nearly empty modules, to see what remains when there is nothing to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["Chain", "distributed_chain", "parameters"]


class Scale(nn.Module):
    """One parameter, so that a stage owns it, and one multiplication, so that it has a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """``[B]`` to ``[B]``."""
        return x * self.scale


class Chain(nn.Module):
    """`num_modules` owned modules, then `num_functions` torch functions of the root itself."""

    def __init__(self, num_modules: int, num_functions: int = 0) -> None:
        super().__init__()
        self.links = nn.ModuleList(Scale() for _ in range(num_modules))
        self.num_functions = num_functions

    def forward(self, x: Tensor) -> Tensor:
        """``[B]`` to ``[B]``."""
        for link in self.links:
            x = link(x)
        for _ in range(self.num_functions):
            x = x + 1.0
        return x


def parameters(num_microbatches: int) -> dict[str, Any]:
    """SMP parameters for two stages."""
    return {
        "partitions": 2,
        "microbatches": num_microbatches,
        "auto_partition": False,
        "default_partition": 0,
    }


def distributed_chain(num_modules: int, num_functions: int = 0) -> smp.DistributedModel:
    """The wrapped chain with its modules alternating between the two stages."""
    chain = Chain(num_modules, num_functions)
    model = smp.DistributedModel(chain)
    for index, link in enumerate(chain.links):
        smp.set_partition(link, index % 2)
    return model
