"""What recording one command costs once its metadata is cached.

Nothing is executed in the time counted: from the call of the step function to the end of the last
microbatch's recording. Splitting the batch and the user's own Python are part of it, as in real
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import smp_lite as smp
from tests.benchmarks.chain import distributed_chain, parameters
from tests.benchmarks.measuring import recorded_first
from tests.benchmarks.spread import Spread
from tests.benchmarks.workload import Workload, train_step
from tests.harness import run_distributed

__all__ = ["measure_in_rank", "table"]

_NUM_MICROBATCHES = 8
_NUM_COMMANDS = 64
_WARM_UP_STEPS = 3


def table(quick: bool) -> Table:
    """Records in one process, which plays both stages, and describes it."""
    num_steps = 5 if quick else 30
    result = Table(
        "what",
        "commands a microbatch",
        "us per command",
        "us per microbatch",
        title=f"Recording with metadata cached, M {_NUM_MICROBATCHES}, {num_steps} steps: median (quartiles)",
    )
    for what in _MODELS:
        (found,) = run_distributed(
            f"{__name__}:measure_in_rank", 1, kwargs={"what": what, "num_steps": num_steps}
        )
        result.add_row(
            what,
            str(found.num_commands),
            Spread.of([s / found.num_commands for s in found.microbatch_s]).text(1e-6),
            Spread.of(found.microbatch_s).text(1e-6, digits=0),
        )
    return result


@dataclass(frozen=True)
class RecordingRun:
    """Mean time to record one microbatch, by step, and the commands in it."""

    microbatch_s: list[float]
    num_commands: int


def measure_in_rank(what: str, num_steps: int) -> RecordingRun:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    return _MODELS[what](num_steps)


def _chain(num_steps: int, num_modules: int, num_functions: int) -> RecordingRun:
    smp.init_in_memory(parameters(_NUM_MICROBATCHES))
    model = distributed_chain(num_modules, num_functions)
    recorded: list[float] = []

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        recorded.append(time.perf_counter())
        return loss

    return _measure(num_steps, model, step, (torch.ones(_NUM_MICROBATCHES),), recorded)


def _gpt(num_steps: int) -> RecordingRun:
    workload = Workload(128, 8, 16, _NUM_MICROBATCHES, _NUM_MICROBATCHES)
    smp.init_in_memory(workload.parameters(2, "interleaved"))
    recorded: list[float] = []
    step = train_step(recorded)
    return _measure(num_steps, workload.distributed(2), step, workload.batch(), recorded)


def _measure(
    num_steps: int,
    model: smp.DistributedModel,
    step: Callable[..., Any],
    batch: tuple[Tensor, ...],
    recorded: list[float],
) -> RecordingRun:
    microbatch_s = []
    for _ in range(_WARM_UP_STEPS + num_steps):
        start = time.perf_counter()
        with recorded_first():
            step(model, *batch)
        microbatch_s.append((recorded[-1] - start) / _NUM_MICROBATCHES)
    assert model.runtime is not None
    last = model.runtime.runner.last_batch
    assert last is not None
    num_commands = sum(len(segment.commands) for segment in last.works[0].graph.segments)
    return RecordingRun(microbatch_s[_WARM_UP_STEPS:], num_commands)


_MODELS: dict[str, Callable[[int], RecordingRun]] = {
    "owned modules": lambda num_steps: _chain(num_steps, _NUM_COMMANDS, 0),
    # Two modules, so that the root is split and its functions are recorded one by one.
    "torch functions": lambda num_steps: _chain(num_steps, 2, _NUM_COMMANDS),
    "GPT, 8 blocks": _gpt,
}
