"""Two plain replicas that average their gradients: what data parallelism must reproduce.

Each takes half of the batch. Replica 1 gets replica 0's buffers before each step, as
``broadcast_buffers`` asks; both draw the same random numbers, as two ranks with one seed do. Halves
are taken by pairs of samples, so that in the case ``data_branch`` each replica goes down a branch
of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_lite.record.values.microbatch import merge_outputs
from tests.models import Batch, Case, split_batch
from tests.transparency.comparison import (
    NUM_MICROBATCHES,
    NUM_SAMPLES,
    Snapshot,
    gradients_of,
    make_optimizer,
    on,
    rolled,
    snapshot,
)

__all__ = ["half", "replica_runs"]


def half(batch: Batch, replica: int) -> Batch:
    """Every other pair of samples."""
    return {name: tensor[torch.arange(len(tensor)) // 2 % 2 == replica] for name, tensor in batch.items()}


def replica_runs(
    case: Case,
    *,
    num_steps: int = 2,
    optimizer_every: int = 1,
    gradient_scale: float = 1.0,
    device: torch.device | None = None,
) -> list[list[Snapshot]]:
    """Snapshots by replica and step; gradients are the averages over both.

    Args:
        case: what to train.
        num_steps: training steps.
        optimizer_every: gradients of that many steps add up, and are averaged after the last of
        them. gradient_scale: times the mean over microbatches.
        device: where both train; None: on torch's default device.
    """
    device = device or torch.get_default_device()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(case.build().to(device))
    optimizers = [make_optimizer(case, model.parameters()) for model in models]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    runs: list[list[Snapshot]] = [[], []]
    for step_index in range(num_steps):
        for buffer, first in zip(models[1].buffers(), models[0].buffers(), strict=True):
            buffer.copy_(first)
        outputs = []
        for replica, model in enumerate(models):
            torch.set_rng_state(state)
            if step_index % optimizer_every == 0:
                model.zero_grad()
            batch = on(device, half(rolled(case.batch(2 * NUM_SAMPLES), step_index), replica))
            outputs.append(merge_outputs(_passes(case, model, batch, gradient_scale)))
        state = torch.get_rng_state()
        last = (step_index + 1) % optimizer_every == 0
        if last:
            _average(models)
        for replica, model in enumerate(models):
            gradients = gradients_of(model.named_parameters())
            if last:
                optimizers[replica].step()
            runs[replica].append(snapshot(model, outputs[replica], gradients))
    return runs


def _passes(case: Case, model: nn.Module, batch: Batch, gradient_scale: float) -> list[Any]:
    """The step function's results by microbatch; gradients are added to what is there."""
    outputs = []
    for microbatch in split_batch(batch, NUM_MICROBATCHES):
        output = case.forward_loss(model, microbatch)
        # A power of two: dividing before the sum gives the same bits as after it.
        (case.loss_of(output) * (gradient_scale / NUM_MICROBATCHES)).backward()
        outputs.append(output)
    return outputs


@torch.no_grad()
def _average(models: list[nn.Module]) -> None:
    """A gradient that one replica has counts as zero on the other; one that none has stays None."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        found = [parameter.grad / 2 for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = sum(found[1:], found[0]).clone() if found else None
