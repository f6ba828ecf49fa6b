"""Two plain replicas that average their gradients: what data parallelism must reproduce.

Each takes half of the batch. Replica 1 gets replica 0's buffers before each step, as ``broadcast_buffers``
asks; both draw the same random numbers, as two ranks with one seed do. Halves are taken by pairs of samples,
so that in the case ``data_branch`` each replica goes down a branch of its own.
"""

from __future__ import annotations

import torch

from smp_lite.record.microbatch import merge_outputs
from tests.models import Batch, Case, plain_step
from tests.transparency.comparison import (
    NUM_MICROBATCHES,
    NUM_SAMPLES,
    Snapshot,
    gradients_of,
    make_optimizer,
    rolled,
    snapshot,
)

__all__ = ["half", "replica_runs"]


def half(batch: Batch, replica: int) -> Batch:
    """Every other pair of samples."""
    return {
        name: tensor[torch.arange(len(tensor)) // 2 % 2 == replica] for name, tensor in batch.items()
    }


def replica_runs(
    case: Case, *, num_steps: int = 2, optimizer_every: int = 1, gradient_scale: float = 1.0
) -> list[list[Snapshot]]:
    """Snapshots by replica and step; gradients are the averages over both.

    Args:
        case: what to train.
        num_steps: training steps.
        optimizer_every: gradients of that many steps add up, and are averaged after the last of them.
        gradient_scale: times the mean over microbatches.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(case.build())
    optimizers = [make_optimizer(case, model.parameters()) for model in models]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    runs: list[list[Snapshot]] = [[], []]
    sums: list[dict[str, torch.Tensor | None]] = [{}, {}]
    for step_index in range(num_steps):
        if step_index % optimizer_every == 0:
            sums = [{}, {}]
        for buffer, first in zip(models[1].buffers(), models[0].buffers(), strict=True):
            buffer.copy_(first)
        outputs = []
        for replica, model in enumerate(models):
            torch.set_rng_state(state)
            model.zero_grad()
            batch = half(rolled(case.batch(2 * NUM_SAMPLES), step_index), replica)
            outputs.append(merge_outputs(plain_step(case, model, batch, NUM_MICROBATCHES).outputs))
            for name, gradient in gradients_of(model.named_parameters()).items():
                before = sums[replica].get(name)
                if gradient is not None:
                    gradient = gradient * gradient_scale
                sums[replica][name] = (
                    gradient if before is None else before if gradient is None else before + gradient
                )
        state = torch.get_rng_state()
        last = (step_index + 1) % optimizer_every == 0
        gradients = [_mean(sums), _mean(sums)] if last else sums
        for replica, model in enumerate(models):
            if last:
                for name, parameter in model.named_parameters():
                    parameter.grad = gradients[replica][name]
                optimizers[replica].step()
            runs[replica].append(snapshot(model, outputs[replica], dict(gradients[replica])))
    return runs


def _mean(parts: list[dict[str, torch.Tensor | None]]) -> dict[str, torch.Tensor | None]:
    """A gradient that one replica has counts as zero on the other; one that none has stays None."""
    found: dict[str, torch.Tensor | None] = {}
    for name in parts[0]:
        there = [part[name] / 2 for part in parts if part[name] is not None]  # type: ignore[operator]
        found[name] = sum(there[1:], there[0]) if there else None
    return found
