"""What one action costs when it computes nothing.

A chain of modules that multiply one number alternates between two stages, so every module is one
forward and one backward action, with a transfer between each two. The time is that of execution
alone, recording left out. Over MPI, waiting for the other rank is part of it, and each rank runs
half of the actions. The same multiplications in plain torch show how little of it is the work
itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from mpi4py import MPI
from rich.table import Table
from torch import Tensor

import smp_lite as smp
from smp_lite.plan.step.actions import COMPUTE_KINDS
from tests.benchmarks.chain import Chain, distributed_chain, parameters
from tests.benchmarks.measuring import recorded_first
from tests.benchmarks.spread import Spread, slowest_rank
from tests.harness import run_distributed

__all__ = ["measure_in_ranks", "table"]

_NUM_MODULES = 32
_NUM_MICROBATCHES = 8
_WARM_UP_STEPS = 3


def table(quick: bool) -> Table:
    """Runs the chain in memory and over MPI and describes both."""
    num_steps = 5 if quick else 30
    kwargs = {"num_steps": num_steps}
    result = Table(
        "where",
        "forwards and backwards a rank",
        "transfers a rank",
        "us per forward or backward",
        "us per action of any kind",
        title=f"Execution of empty actions, {_NUM_MODULES} modules on alternating stages, "
        f"M {_NUM_MICROBATCHES}, {num_steps} steps: median (quartiles)",
    )
    plain_s = _plain_torch(num_steps)
    num_compute = 2 * _NUM_MODULES * _NUM_MICROBATCHES
    floor = Spread.of([s / num_compute for s in plain_s]).text(1e-6)
    result.add_row("plain torch, one process", str(num_compute), "0", floor, floor)
    for where, world_size in (("in memory, one process", 1), ("MPI, 2 ranks", 2)):
        ranks: list[RankRun] = run_distributed(
            f"{__name__}:measure_in_ranks", world_size, kwargs=kwargs, timeout_s=300.0
        )
        executed_s = slowest_rank([rank.executed_s for rank in ranks])
        compute, transfers = ranks[0].num_compute, ranks[0].num_transfers
        result.add_row(
            where,
            str(compute),
            str(transfers),
            Spread.of([s / compute for s in executed_s]).text(1e-6),
            Spread.of([s / (compute + transfers) for s in executed_s]).text(1e-6),
        )
    return result


@dataclass(frozen=True)
class RankRun:
    """Execution times of one rank's steps, and how many actions each ran."""

    executed_s: list[float]
    num_compute: int
    num_transfers: int


def measure_in_ranks(num_steps: int) -> RankRun:
    """Runs in every rank; a single rank plays both stages in memory."""
    torch.set_num_threads(1)
    in_memory = MPI.COMM_WORLD.Get_size() == 1
    (smp.init_in_memory if in_memory else smp.init)(parameters(_NUM_MICROBATCHES))
    model = distributed_chain(_NUM_MODULES)
    recorded = 0.0

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        nonlocal recorded
        loss = model(x).sum()
        model.backward(loss)
        recorded = time.perf_counter()
        return loss

    executed_s = []
    x = torch.ones(_NUM_MICROBATCHES)
    for _ in range(_WARM_UP_STEPS + num_steps):
        model.zero_grad()
        MPI.COMM_WORLD.Barrier()
        with recorded_first():
            step(model, x)
        executed_s.append(time.perf_counter() - recorded)
    assert model.runtime is not None
    batch = model.runtime.runner.last_batch
    assert batch is not None
    actions = [action for stage in model.runtime.executors for action in batch.schedule[stage]]
    num_compute = sum(action.kind in COMPUTE_KINDS for action in actions)
    return RankRun(executed_s[_WARM_UP_STEPS:], num_compute, len(actions) - num_compute)


def _plain_torch(num_steps: int) -> list[float]:
    chain = Chain(_NUM_MODULES)
    times = []
    for _ in range(_WARM_UP_STEPS + num_steps):
        chain.zero_grad()
        start = time.perf_counter()
        for x in torch.ones(_NUM_MICROBATCHES).split(1):
            chain(x).sum().backward()
        times.append(time.perf_counter() - start)
    return times[_WARM_UP_STEPS:]
