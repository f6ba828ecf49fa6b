"""Autocast around a step, and values that go from stage to stage under it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models.layers import WIDTH
from tests.transparency.conftest import OpenSession

MICROBATCHES = 2


class Gated(nn.Module):
    """Casts what it is given twice; in its own code, if it is told to."""

    def __init__(self, *, by_itself: bool) -> None:
        super().__init__()
        self.by_itself = by_itself
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=self.by_itself or torch.is_autocast_enabled("cpu")
        ):
            return F.silu(self.gate(x)) * self.up(x)


class Net(nn.Module):
    def __init__(self, *, by_itself: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gated = Gated(by_itself=by_itself)

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(self.norm(self.first(x)).float())


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_each_use_of_a_value_from_another_stage_is_cast_by_itself(
    pipeline: str, by_itself: bool, open_session: OpenSession
) -> None:
    """It is a leaf there, which autocast casts once: gradients of uses were added in the low precision."""
    torch.manual_seed(0)
    net = Net(by_itself=by_itself)
    plain = copy.deepcopy(net)
    open_session(2, "zigzag", microbatches=MICROBATCHES, pipeline=pipeline)
    model = smp.DistributedModel(net)
    smp.set_partition(net.gated, 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(MICROBATCHES * 5, WIDTH)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=not by_itself):
            found = step(model, x).outputs
            wanted = []
            for part in x.chunk(MICROBATCHES):
                loss = plain(part).float().square().mean()
                (loss / MICROBATCHES).backward()
                wanted.append(float(loss))
        assert [float(loss) for loss in found] == wanted
        for (name, one), other in zip(net.named_parameters(), plain.parameters()):
            assert torch.equal(one.grad, other.grad), name
