"""Who computes the loss: the root, the root piece by piece in place, or the step function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case
from tests.models.layers import WIDTH, Chain, mlp_blocks, regression_batch

__all__ = ["CASES"]


class RootLoss(nn.Module):
    """The root takes the target and returns loss and prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        prediction = self.head(x)
        return F.mse_loss(prediction, target), prediction


def root_loss(model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch["x"], batch["target"])


class AccumulatedLoss(nn.Module):
    """Adds each block's loss into a plain zero tensor in place, as deep supervision often does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for block in self.blocks:
            x = x + block(x)
            total += F.mse_loss(x, target)
        return total


def weighted_loss(model: Callable[..., Any], batch: Batch) -> dict[str, Tensor]:
    """A loss of several ops and of two calls of the model."""
    error = (model(batch["x"]) - batch["target"]).square()
    other = model(batch["x"].flip(0))
    loss = (error * torch.linspace(0.5, 1.5, WIDTH)).mean() + 0.1 * other.abs().mean()
    return {"loss": loss, "error": error}


CASES = (
    Case(
        "root_loss",
        RootLoss,
        regression_batch,
        "the model computes its loss",
        root_loss,
        loss_of=lambda output: output[0],
    ),
    Case(
        "accumulated_loss",
        AccumulatedLoss,
        regression_batch,
        "an ordinary tensor takes activations in place: `total += loss`",
        lambda model, batch: model(batch["x"], batch["target"]),
    ),
    Case(
        "step_loss",
        Chain,
        regression_batch,
        "the step function computes the loss, from two calls of the model",
        weighted_loss,
        loss_of=lambda output: output["loss"],
    ),
)
