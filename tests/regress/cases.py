"""What the ranks of regression tests run."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn

import smp_lite as smp


class _Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Every replica finds another layer slow.
        if self.out_features % 8 == smp.dp_rank():
            time.sleep(0.1)
        return super().forward(x)


def partition_by_times() -> dict[str, int]:
    smp.init()
    sizes = [16, 24, 32, 17, 25, 33, 40]
    model = nn.Sequential(*(_Slow(a, b) for a, b in itertools.pairwise(sizes)))
    wrapped = smp.DistributedModel(model, trace_execution_times=True)

    @smp.step
    def step(wrapped: Any, x: torch.Tensor) -> Any:
        loss = wrapped(x).sum()
        wrapped.backward(loss)
        return loss

    step(wrapped, torch.ones(4, 16))
    return dict(wrapped.partition.stage_of)
