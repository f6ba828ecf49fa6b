"""One training step as it would be split and scheduled, without processes and without computing it.

What `smp-lite plan` prints, as numbers: for comparing many ways to split one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from train_gpt import train_step

import smp_lite as smp
from smp_lite.lifecycle.starting import planning
from smp_lite.plan.partitioning.report import StageSummary, stage_summaries
from smp_lite.plan.step.memory import StageMemory
from smp_lite.plan.step.simulate import Simulation
from smp_lite.preview.memory_preview import preview_memory
from smp_lite.preview.step_preview import PlanReady, simulate_batch, stop_when_planned
from smp_lite.session import current

__all__ = ["PlannedStep", "plan_step"]


@dataclass(frozen=True)
class PlannedStep:
    """What every stage holds and does.

    stages: modules, and shares of the model's memory and computation.
    simulation: the schedule, played with the recorded computation (in GFLOP) as time.
    memory: what one rank of each stage holds at its peak.
    """

    stages: tuple[StageSummary, ...]
    simulation: Simulation
    memory: tuple[StageMemory, ...]


def plan_step(
    build: Callable[[], nn.Module], parameters: Mapping[str, Any], *, batch_size: int, context: int
) -> PlannedStep:
    """Plans one step of `train_step` on the model that `build` returns.

    Args:
        build: called with the library ready, so that it may use ``smp.partition``.
        parameters: as for ``smp.init``.
        batch_size: samples of the step.
        context: tokens in a sample.
    """
    with planning(parameters, stop_when_planned):
        smp.init()
        model = smp.DistributedModel(build())
        tokens = torch.zeros(batch_size, context, dtype=torch.int64)
        try:
            train_step(model, tokens, tokens)
        except PlanReady as ready:
            partition, costs = model.partition_and_costs
            return PlannedStep(
                stages=stage_summaries(costs, partition),
                simulation=simulate_batch(ready.batch),
                memory=preview_memory(current(), ready.batch, ready.recordings, ready.inputs).stages,
            )
    raise AssertionError("a step with a backward is planned before it runs")
