"""What one action costs when it computes nothing.

A chain of modules that multiply one number alternates between two stages, so every module is one
forward and one backward action, with a transfer between each two. The time is that of execution
alone, recording left out. Over MPI, waiting for the other rank is part of it, and each rank runs
half of the actions. The same multiplications in plain torch show how little of it is the work
itself; the same chain by hand over mpi4py shows what sending and waiting take.
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
    for where, world_size, function in (
        ("in memory, one process", 1, "measure_in_ranks"),
        ("MPI, 2 ranks", 2, "measure_in_ranks"),
        ("by hand, MPI, 2 ranks", 2, "by_hand_in_ranks"),
    ):
        ranks: list[RankRun] = run_distributed(
            f"{__name__}:{function}", world_size, kwargs=kwargs, timeout_s=300.0
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


def by_hand_in_ranks(num_steps: int) -> RankRun:
    """The same chain over mpi4py, as short as it can be, all forwards first: what is left to a library."""
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    own = range(rank, _NUM_MODULES, 2)
    chain = Chain(_NUM_MODULES)
    microbatches = range(_NUM_MICROBATCHES)
    places = [(i, m) for i in own for m in microbatches]

    def buffer(tensor: Tensor) -> list[object]:
        return [MPI.buffer.fromaddress(tensor.data_ptr(), 4), MPI.BYTE]

    def arriving(wanted: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[Tensor, MPI.Request]]:
        found = {}
        for place in wanted:
            tensor = torch.empty(1)
            found[place] = tensor, comm.Irecv(buffer(tensor), source=1 - rank)
        return found

    def arrived(tensor: Tensor, request: MPI.Request) -> Tensor:
        while not request.Test():
            pass
        return tensor

    executed_s = []
    for _ in range(_WARM_UP_STEPS + num_steps):
        chain.zero_grad()
        comm.Barrier()
        start = time.perf_counter()
        sent, kept = [], {}
        values = arriving([place for place in places if place[0] > 0])
        gradients = arriving([(i, m) for i, m in reversed(places) if i + 1 < _NUM_MODULES])
        for i, m in places:
            x = arrived(*values.pop((i, m))).requires_grad_() if i else torch.ones(1)
            y = chain.links[i](x)
            kept[i, m] = x, y
            if i + 1 < _NUM_MODULES:
                sent.append(comm.Isend(buffer(y), dest=1 - rank))
        for i, m in reversed(places):
            x, y = kept.pop((i, m))
            if i + 1 < _NUM_MODULES:
                y.backward(arrived(*gradients.pop((i, m))))
            else:
                y.sum().backward()
            if i:
                assert x.grad is not None
                sent.append(comm.Isend(buffer(x.grad), dest=1 - rank))
                kept[-1 - len(sent), m] = x, x.grad  # until it has left
        MPI.Request.Waitall(sent)
        executed_s.append(time.perf_counter() - start)
    return RankRun(executed_s[_WARM_UP_STEPS:], 2 * len(places), 2 * len(places) - _NUM_MICROBATCHES)


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
