"""Scripts that once went wrong only because a step ran while it was recorded."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models.layers import WIDTH
from tests.transparency.schedules.ahead import CHECKED, _is_late, noted_ends, train
from tests.transparency.schedules.differing import MICROBATCHES


class Settings:
    """What cannot be carried from a call to its run."""

    def __init__(self) -> None:
        self.values = [[1.0]]


class Reading(nn.Module):
    """A layer whose code reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.settings = {"of": [Settings()]}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.settings["of"][0].values[0][0]


def change_after_a_cut() -> None:
    """Microbatch 2 of one step has another keyword; before microbatch 3 what its call reads is changed."""
    model = smp.DistributedModel(Reading())
    settings: Any = model.module.settings["of"][0]
    count = 0

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        nonlocal count
        number, count = count, count + 1
        if _is_late(number, 3, CHECKED + 1):
            settings.values[0][0] = 5.0
        output = F.leaky_relu(model(x), 0.5 if _is_late(number, 2, CHECKED + 1) else 0.25)
        model.backward(output.mean())
        return output

    for _ in range(CHECKED + 2):
        step(model, torch.ones(2 * MICROBATCHES, WIDTH))


class InCycle:
    """Each output is in a reference cycle, which Python collects on one rank only, in one microbatch."""

    def __init__(self, rank: int) -> None:
        self.is_here = smp.mp_rank() == rank

    def __call__(self, model: Any, number: int, x: Tensor, target: Tensor) -> Tensor:
        held: dict[str, Any] = {"output": model(x)}
        held["self"] = held
        result = held["output"] * 1.0
        del held
        if self.is_here and _is_late(number, 2, CHECKED + 1):
            gc.set_threshold(1)
        garbage = [[each] for each in range(10)]
        gc.set_threshold(100_000)
        return result * (len(garbage) / 10)


def train_with_cycles(rank: int) -> list[Any]:
    smp.init()
    threshold = gc.get_threshold()
    try:
        with noted_ends() as ends:
            found = train(InCycle(rank), CHECKED + 3)
    finally:
        gc.set_threshold(*threshold)
    return [*found, ends]
