"""A checkpointed call that assigns buffers or draws from generators of its own is as one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


class Drawing(nn.Module):
    """Draws from a generator that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(4, generator=self.generator)


_GENERATOR = torch.Generator()


class DrawingFromElsewhere(Drawing):
    """Draws from generators that it reaches through a list and by a global name."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [{"generator": self.generator}]
        del self.generator
        _GENERATOR.manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(4, generator=self.held[0]["generator"]) + torch.rand(4, generator=_GENERATOR)
        return self.linear(x).tanh() * mask


def _drops() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))


def _nested() -> nn.Module:
    return nn.Sequential(_drops(), nn.Linear(4, 4), _drops())


def _trained(kind: Any, strategy: str | None) -> tuple[list[float], dict[str, Tensor]]:
    smp.reset()
    smp.init_in_memory({"partitions": 2, "microbatches": 1})
    torch.manual_seed(0)
    net = _nested() if kind is _nested else nn.Sequential(kind(), nn.Tanh(), kind())
    model = smp.DistributedModel(net)
    for part in model.get_module().modules():
        if strategy is not None and isinstance(part, nn.Sequential):
            smp.set_activation_checkpointing(part, strategy=strategy)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for i in range(3):
        optimizer.zero_grad()
        losses.append(float(step(model, torch.linspace(-1, i, 16).reshape(4, 4)).reduce_mean()))
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", [Counting, Drawing, DrawingFromElsewhere, _nested])
@pytest.mark.parametrize("strategy", ["each", "contiguous"])
def test_the_same_as_without(kind: Any, strategy: str) -> None:
    losses, state = _trained(kind, None)
    found, found_state = _trained(kind, strategy)
    assert losses == found
    assert all(torch.equal(value, found_state[name]) for name, value in state.items())
