"""What a step costs that computes nothing: two modules of one multiplication, one on each rank.

Of the time, that of the rank's forwards and backwards is what running anything takes; the rest is what a
step does beside them: it settles whose batch it is, records, compares, waits for the other rank, and tells
outcomes and results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

import smp_lite as smp
from tests.benchmarks.chain import distributed_chain, parameters
from tests.benchmarks.measuring import timed
from tests.benchmarks.spread import Spread, slowest_rank
from tests.harness import run_distributed

__all__ = ["measure_in_ranks", "table"]

_NUM_STAGES = 2
_NUM_MICROBATCHES = 8
_WARM_UP_STEPS = 5


def table(quick: bool) -> Table:
    """Runs the steps with and without replay and describes them."""
    num_steps = 5 if quick else 100
    result = Table(
        "step",
        "us",
        "of it, forwards and backwards of a rank",
        title=f"A step without model work, {_NUM_STAGES} ranks, M {_NUM_MICROBATCHES}, {num_steps} steps: "
        "median (quartiles)",
    )
    for what, static_mode in (("recorded", False), ("replayed (static_mode)", True)):
        ranks: list[RankRun] = run_distributed(
            f"{__name__}:measure_in_ranks",
            _NUM_STAGES,
            kwargs={"num_steps": num_steps, "static_mode": static_mode},
            timeout_s=300.0,
        )
        steps_s = slowest_rank([rank.steps_s for rank in ranks])
        computing_s = slowest_rank([rank.computing_s for rank in ranks])
        result.add_row(
            what, Spread.of(steps_s).text(1e-6, digits=0), Spread.of(computing_s).text(1e-6, digits=0)
        )
    return result


@dataclass(frozen=True)
class RankRun:
    """Seconds of one rank's steps, and of the forwards and backwards in them."""

    steps_s: list[float]
    computing_s: list[float]


def measure_in_ranks(num_steps: int, static_mode: bool) -> RankRun:
    """Runs in both ranks."""
    torch.set_num_threads(1)
    smp.init({**parameters(_NUM_MICROBATCHES), "static_mode": static_mode})
    model = distributed_chain(_NUM_STAGES)
    x = torch.ones(_NUM_MICROBATCHES)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    steps_s, computing_s = [], []
    for _ in range(_WARM_UP_STEPS + num_steps):
        model.zero_grad()
        steps_s.append(timed(lambda: step(model, x)))
        assert model.runtime is not None
        (own,) = model.runtime.runner.spans().values()
        computing_s.append(sum(span.end_s - span.start_s for span in own))
    return RankRun(steps_s[_WARM_UP_STEPS:], computing_s[_WARM_UP_STEPS:])
