"""What one action costs when it computes nothing.

A chain of modules that multiply one number alternates between two stages, so every module is one
forward and one backward action, with a transfer between each two. The time is that of execution
alone, recording left out. Over MPI, waiting for the other rank is part of it, and each rank runs
half of the actions. The same multiplications in plain torch show how little of it is the work
itself; the same list of actions with nothing but torch's and MPI's own calls, what no library can
go below: a detached leaf, the module, a backward, a send or a receive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI
from rich.table import Table
from torch import Tensor

import smp_lite as smp
from smp_lite.plan.step.actions import COMPUTE_KINDS, Action, ActionKind
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
        if world_size > 1:
            by_hand_s = slowest_rank([rank.by_hand_s for rank in ranks])
            result.add_row(
                f"{where}, by hand",
                str(compute),
                str(transfers),
                Spread.of([s / compute for s in by_hand_s]).text(1e-6),
                Spread.of([s / (compute + transfers) for s in by_hand_s]).text(1e-6),
            )
    return result


@dataclass(frozen=True)
class RankRun:
    """Execution times of one rank's steps, by the library and by hand, and how many actions each ran."""

    executed_s: list[float]
    by_hand_s: list[float]
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

    executed_s, by_hand_s = [], []
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
        if not in_memory:
            gradients = [parameter.grad for parameter in model.local_parameters()]
            model.zero_grad()
            (here,) = model.runtime.executors
            by_hand_s.append(_by_hand(batch.schedule[here], model, x))
            assert gradients == [parameter.grad for parameter in model.local_parameters()]
    actions = [action for stage in model.runtime.executors for action in batch.schedule[stage]]
    num_compute = sum(action.kind in COMPUTE_KINDS for action in actions)
    return RankRun(
        executed_s[_WARM_UP_STEPS:], by_hand_s[_WARM_UP_STEPS:], num_compute, len(actions) - num_compute
    )


def _by_hand(actions: Sequence[Action], model: smp.DistributedModel, x: Tensor) -> float:
    """Runs this rank's list with torch's and MPI's own calls; returns the seconds.

    A value is known by its microbatch and the module that makes it.
    """
    comm, modules = MPI.COMM_WORLD, list(model.module.links)
    pieces = x.split(1)
    leaves: dict[tuple[int, int], Tensor] = {}
    values: dict[tuple[int, int], Tensor] = {}
    arriving: dict[tuple[int, int], tuple[Tensor, MPI.Request]] = {}
    sent: list[tuple[Tensor, MPI.Request]] = []
    next_visit: dict[int, int] = {}
    least = torch.tensor([1 / _NUM_MICROBATCHES])

    def arrived(key: tuple[int, int]) -> Tensor:
        tensor, request = arriving.pop(key)
        while not request.Test():
            pass
        return tensor

    comm.Barrier()
    begun = time.perf_counter()
    for stage, kind, m, visit, _, peer in actions:
        number = 2 * visit + stage
        if kind is ActionKind.FORWARD:
            leaf = arrived((m, number)).requires_grad_() if number else pieces[m]
            leaves[m, number] = leaf
            values[m, number] = modules[number](leaf)
        elif kind is ActionKind.BACKWARD:
            gradient = arrived((m, number)) if number + 1 < _NUM_MODULES else least
            torch.autograd.backward([values.pop((m, number))], [gradient])
        elif kind is ActionKind.SEND_FORWARD:
            tensor = values[m, number].detach()
            sent.append((tensor, comm.Isend(tensor, peer, m)))
        elif kind is ActionKind.SEND_BACKWARD:
            tensor = leaves.pop((m, number)).grad
            sent.append((tensor, comm.Isend(tensor, peer, m)))
        else:
            tensor = torch.empty(1)
            # A receive says in which visit its stage waits for a gradient, but not for a value.
            if kind is ActionKind.RECV_FORWARD:
                number = next_visit[m] = next_visit.get(m, -1 if stage else 0) + 2
            arriving[m, number] = tensor, comm.Irecv(tensor, peer, m)
    for _, request in sent:
        request.Wait()
    return time.perf_counter() - begun


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
