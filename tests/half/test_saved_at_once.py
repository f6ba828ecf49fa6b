"""A checkpoint that is resumed and saved again before any step has put it in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.harness import run_distributed


@pytest.mark.ci
def test_all_ranks_are_told_that_a_step_comes_first(tmp_path: Path) -> None:
    """Only one replica would read the state for a full save."""
    found = run_distributed(
        "tests.half.test_saved_at_once:resume_and_save",
        4,
        kwargs={"folder": str(tmp_path)},
        parameters={"partitions": 2, "microbatches": 2, "ddp": True, "fp16": True},
    )
    for told, states in found:
        assert "waits for the first step" in told
        assert states[0] == states[1]


def resume_and_save(folder: str) -> tuple[str, list[dict[str, list[float]]]]:
    """On each rank: what the second save says, and the weights after a step, saved and resumed."""

    def build() -> tuple[Any, Any, Any]:
        smp.init()
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).float().square().mean()
            model.backward(loss)
            return loss

        def train() -> None:
            optimizer.zero_grad()
            step(model, torch.ones(4, 6))
            optimizer.step()

        return model, optimizer, train

    def weights(model: Any) -> dict[str, list[float]]:
        return {name: value.float().flatten().tolist() for name, value in model.state_dict().items()}

    try:
        model, optimizer, train = build()
        train()
        smp.save_checkpoint(folder, "one", partial=False, model=model, optimizer=optimizer)
        smp.reset()

        model, optimizer, train = build()
        smp.resume_from_checkpoint(folder, "one", partial=False)
        with pytest.raises(smp.SMPError) as told:
            smp.save_checkpoint(folder, "two", partial=False, model=model, optimizer=optimizer)
        train()
        smp.save_checkpoint(folder, "two", partial=False, model=model, optimizer=optimizer)
        train()
        states = [weights(model)]
        smp.reset()

        model, optimizer, train = build()
        smp.resume_from_checkpoint(folder, "two", partial=False)
        train()
        return str(told.value), [*states, weights(model)]
    finally:
        smp.reset()
