"""Peak memory of each rank against one process that trains the same model.

Counted is resident memory, as Linux keeps its high-water mark (VmHWM), in fresh processes, above
what the process held after a training step of a tiny model, since torch loads much at the first
one. *Building* is the peak up to the end of the first step: every rank builds the whole model
before it is cut. *Training* is the peak of later steps, with AdamW, for which the mark is set back
(clear_refs). The one process runs the same microbatches one after another. *Planned* is what the library says
beforehand, of tensors alone: resident memory holds what the allocator keeps back and what kernels need too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

import smp_lite as smp
from smp_lite.lifecycle.starting import planning
from smp_lite.preview.memory_preview import preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.session import current
from tests.benchmarks.workload import Workload, next_byte_loss, train_step
from tests.harness import run_distributed

__all__ = ["measure_in_ranks", "table"]

_NUM_LATER_STEPS = 2
_TINY = Workload(16, 1, 8, 2, num_microbatches=2)


def table(quick: bool) -> Table:
    """Trains with one, two and four processes and describes their memory."""
    workload = Workload(256, 8, 64, 16) if quick else Workload(768, 8, 256, 16)
    num_parameters = sum(p.numel() for p in workload.model().parameters())
    result = Table(
        "processes",
        "training: MiB a rank",
        "planned: MiB",
        "largest / one process",
        "building: largest MiB",
        title=f"Peak memory, {workload}, M {workload.num_microbatches}, "
        f"{num_parameters / 1e6:.1f} M parameters, AdamW, interleaved",
    )
    single = 0
    for num_stages in (1, 2) if quick else (1, 2, 4):
        ranks: list[RankMemory] = run_distributed(
            f"{__name__}:measure_in_ranks",
            num_stages,
            kwargs={"workload": workload},
            timeout_s=600.0,
            fresh=True,
        )
        largest = max(rank.training_bytes for rank in ranks)
        single = single or largest
        result.add_row(
            str(num_stages) if num_stages > 1 else "1, plain torch",
            ", ".join(f"{rank.training_bytes / 2**20:.0f}" for rank in ranks),
            ", ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in _planned(workload, num_stages)),
            f"{largest / single:.2f}",
            f"{max(rank.building_bytes for rank in ranks) / 2**20:.0f}",
        )
    return result


@dataclass(frozen=True)
class RankMemory:
    """Peaks of one process above its memory before it built the model."""

    building_bytes: int
    training_bytes: int


def measure_in_ranks(workload: Workload) -> RankMemory:
    """Runs in every rank; a single rank trains the plain model without the library."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    num_stages = MPI.COMM_WORLD.Get_size()
    _plain_step(_TINY)()
    baseline = _status_bytes("VmRSS")
    step = _plain_step(workload) if num_stages == 1 else _smp_step(workload, num_stages)
    step()
    building = _status_bytes("VmHWM") - baseline
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_NUM_LATER_STEPS):
        step()
    return RankMemory(building, _status_bytes("VmHWM") - baseline)


def _planned(workload: Workload, num_stages: int) -> list[int]:
    """Bytes of each stage by `smp-lite plan`; none for plain torch."""
    if num_stages == 1:
        return []
    with planning(workload.parameters(num_stages, "interleaved"), stop_when_planned):
        smp.init()
        model = workload.distributed(num_stages)
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        try:
            train_step([])(model, *workload.batch())
        except PlanReady as ready:
            memory = preview_memory(current(), ready.batch, ready.recordings, ready.inputs)
            return [stage.total for stage in memory.stages]
    raise AssertionError("a step with a backward is planned before it runs")


def _plain_step(workload: Workload) -> Callable[[], None]:
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = workload.batch()
    size = workload.batch_size // workload.num_microbatches

    def step() -> None:
        optimizer.zero_grad()
        for inputs, wanted in zip(tokens.split(size), targets.split(size), strict=True):
            loss = next_byte_loss(model(inputs), wanted)
            (loss / workload.num_microbatches).backward()
        optimizer.step()

    return step


def _smp_step(workload: Workload, num_stages: int) -> Callable[[], None]:
    smp.init(workload.parameters(num_stages, "interleaved"))
    model = workload.distributed(num_stages)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    tokens, targets = workload.batch()
    train = train_step([])

    def step() -> None:
        optimizer.zero_grad()
        train(model, tokens, targets)
        optimizer.step()

    return step


def _status_bytes(field: str) -> int:
    """A memory line of /proc/self/status, which counts in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
