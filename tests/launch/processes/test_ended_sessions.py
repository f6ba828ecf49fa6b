"""What sessions leave behind in a process that begins another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.harness import run_distributed


def threads_of_groups() -> int:
    """How many there are before a session that has process groups and trains."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    smp.init()
    model = smp.DistributedModel(nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: smp.DistributedModel, x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    step(model, torch.ones(4, 4))
    optimizer.step()
    return sum("gloo" in name for name in names)


@pytest.mark.ci
def test_threads_of_process_groups_end() -> None:
    found = [
        run_distributed(
            "tests.launch.processes.test_ended_sessions:threads_of_groups",
            2,
            parameters={"ddp": True, "partitions": 1},
        )
        for _ in range(4)
    ]
    assert max(found[3]) <= max(found[1])
