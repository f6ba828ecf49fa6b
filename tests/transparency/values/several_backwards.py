"""What the ranks run for the tests of several ``model.backward`` calls in a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models import Batch
from tests.models.layers import WIDTH, Chain, regression_batch
from tests.transparency.rounds import Round, assert_rounds_equal

__all__ = ["STEPS", "train"]


def two_forwards(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["target"])
    backward(loss)
    penalty = model(batch["x"] * 0.5).square().mean()
    backward(penalty)
    return loss, penalty


def the_later_first(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    losses = [F.mse_loss(model(batch["x"] * scale), batch["target"]) for scale in (1.0, 0.5, 0.25)]
    for loss in reversed(losses):
        backward(loss)
    return losses


def looked_at_between(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["target"])
    backward(loss if loss.item() > 0 else -loss)
    penalty = model(batch["x"] * 0.5).square().mean()
    backward(penalty)
    return loss, penalty


def from_one_forward(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    """Autograd would go through the model twice (``retain_graph``)."""
    output = model(batch["x"])
    loss, penalty = F.mse_loss(output, batch["target"]), output.square().mean()
    backward(loss)
    backward(penalty)
    return loss, penalty


def one_for_all(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    """As with the branches of a siamese network."""
    outputs = [model(batch["x"] * scale) for scale in (1.0, 0.5, 0.25)]
    loss = sum((F.mse_loss(output, batch["target"]) for output in outputs), torch.zeros(()))
    backward(loss)
    return loss


def penalised(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    """The step function computes with weights when several forward passes have."""
    losses = [F.mse_loss(model(batch["x"] * scale), batch["target"]) for scale in (1.0, 0.5)]
    for i, scale in enumerate((0.01, 0.02)):
        losses[i] = losses[i] + scale * sum(p.square().sum() for p in model.parameters())
    for loss in losses:
        backward(loss)
    return losses


STEPS = {
    step.__name__: step
    for step in (two_forwards, the_later_first, looked_at_between, from_one_forward, one_for_all, penalised)
}


class OwnParameter(Chain):
    """Its root reads a parameter of its own, before calls of another stage and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x @ self.own)) @ self.own * self.own.mean()


class LooksWithin(OwnParameter):
    """What follows the look runs with the begin of the next forward pass, whose backward is another."""

    def forward(self, x: Tensor) -> Tensor:
        y = Chain.forward(self, torch.tanh(x @ self.own))
        assert float(y.detach().abs().sum()) > 0
        return torch.tanh(Chain.forward(self, y @ self.own)) * self.own.mean()


MODELS: dict[str, type[nn.Module]] = {model.__name__: model for model in (Chain, OwnParameter, LooksWithin)}


def train(name: str, model: str = "Chain", tolerance: float = 0.0) -> None:
    """Raises AssertionError where what this rank holds is not that of one process."""
    smp.init()
    rounds = [Round(STEPS[name], regression_batch(8))] * 3
    assert_rounds_equal(MODELS[model], rounds, tolerance=tolerance)
