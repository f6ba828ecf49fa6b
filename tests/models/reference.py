"""The plain model's own training step, microbatch after microbatch: what must be reproduced.

Gradients are summed over microbatches and divided at the end. With a power of two of microbatches,
which the tests use, dividing each loss instead gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.models.case import Batch, Case, split_batch

__all__ = ["PlainStep", "plain_step"]


@dataclass(frozen=True)
class PlainStep:
    """What one step leaves behind; gradients stay in the model's parameters.

    Attributes:
        outputs: what the step function returned, by microbatch.
        losses: scalar loss by microbatch, detached.
    """

    outputs: list[Any]
    losses: list[Tensor]


def plain_step(case: Case, model: nn.Module, batch: Batch, num_microbatches: int) -> PlainStep:
    """Runs forward and backward of one step; gradients are the mean over microbatches."""
    outputs = []
    for microbatch in split_batch(batch, num_microbatches):
        output = case.forward_loss(model, microbatch)
        case.loss_of(output).backward()
        outputs.append(output)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(num_microbatches)
    return PlainStep(outputs, [case.loss_of(output).detach() for output in outputs])
