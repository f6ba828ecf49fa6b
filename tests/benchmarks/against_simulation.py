"""Whether the simulator tells the truth: a step's real time against the simulated one.

The simulator is given what this very run measured: how long every action took, and the wire's latency and
bandwidth from a ping-pong. Compared is the time from the first action's start to the last one's end, over
both ranks; their clocks are one, since they share a machine. What a step spends before and after that, on
recording above all, is shown beside it.

Two ratios, since they tell two things apart. Given a step's own actions, the simulator must say how long that
step took: what is missing is time that it does not know of. Given each action's median over all steps, it
predicts a step, and on a noisy machine falls short: what one action takes longer than usual delays the other
rank, what another takes less is waited away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from mpi4py import MPI
from rich.table import Table

import smp_lite as smp
from smp_lite.comm.waiting import wait_until
from smp_lite.comm.wires.wire import Wire
from smp_lite.plan.step.simulate import Simulation, simulate
from smp_lite.record.values.placed import TensorMeta
from smp_lite.runtime.step.batches import Batch
from smp_lite.session import current
from tests.benchmarks.measuring import recorded_first
from tests.benchmarks.spread import Spread
from tests.benchmarks.workload import Workload, train_step
from tests.harness import run_distributed

__all__ = ["measure_in_ranks", "table"]

_NUM_STAGES = 2
_WARM_UP_STEPS = 3
_NUM_PINGS = 50
_LARGE_BYTES = 1 << 22


def table(quick: bool) -> Table:
    """Runs the steps, simulates them and describes both."""
    # (workload, number of steps)
    plan = [(Workload(128, 8, 64, 16), 20), (Workload(512, 8, 256, 16), 6)]
    if quick:
        plan = [(Workload(64, 4, 32, 16), 4)]
    result = Table(
        "workload",
        "pipeline",
        "steps",
        "simulated ms",
        "executed ms",
        "by own actions",
        "by medians",
        "simulated idle share",
        "whole step ms",
        "of it recording ms",
        title="Simulated over executed time of actions, 2 ranks, M 8: median (quartiles)",
    )
    for workload, num_steps in plan:
        for pipeline in ("interleaved", "zero_bubble", "simple"):
            ranks: list[RankRun] = run_distributed(
                f"{__name__}:measure_in_ranks",
                _NUM_STAGES,
                kwargs={"workload": workload, "pipeline": pipeline, "num_steps": num_steps},
                timeout_s=900.0,
            )
            simulation = _simulated(ranks, range(num_steps))
            executed = [_executed_s(ranks, step) for step in range(num_steps)]
            own = [_simulated(ranks, [step]).makespan for step in range(num_steps)]
            result.add_row(
                str(workload),
                pipeline,
                str(num_steps),
                f"{simulation.makespan * 1e3:.1f}",
                Spread.of(executed).text(1e-3),
                Spread.of([s / e for s, e in zip(own, executed, strict=True)]).text(digits=3),
                Spread.of([simulation.makespan / e for e in executed]).text(digits=3),
                f"{simulation.idle_share:.1%}",
                Spread.of(ranks[0].step_s).text(1e-3),
                Spread.of(ranks[0].recording_s).text(1e-3),
            )
    return result


@dataclass(frozen=True)
class RankRun:
    """What one rank measured; `spans` holds for each step (action, start, end) in seconds."""

    batch: Batch
    spans: list[list[tuple[str, float, float]]]
    step_s: list[float]
    recording_s: list[float]
    wire: tuple[float, float]


def measure_in_ranks(workload: Workload, pipeline: str, num_steps: int) -> RankRun:
    """Runs in both ranks: times the wire, then trains."""
    torch.set_num_threads(1)
    smp.init(workload.parameters(_NUM_STAGES, pipeline))
    wire = current().wire()
    assert wire is not None
    speed = _wire_speed(wire)
    model = workload.distributed(_NUM_STAGES)
    tokens, targets = workload.batch()
    recorded: list[float] = []
    step = train_step(recorded)
    spans, step_s, recording_s = [], [], []
    for _ in range(_WARM_UP_STEPS + num_steps):
        model.zero_grad()
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        with recorded_first():
            step(model, tokens, targets)
        step_s.append(time.perf_counter() - start)
        recording_s.append(recorded[-1] - start)
        assert model.runtime is not None
        (own,) = model.runtime.runner.spans().values()
        spans.append([(str(span.action), span.start_s, span.end_s) for span in own])
    batch = model.runtime.runner.last_batch
    assert batch is not None
    kept = slice(_WARM_UP_STEPS, None)
    return RankRun(batch, spans[kept], step_s[kept], recording_s[kept], speed)


def _simulated(ranks: list[RankRun], steps: Iterable[int]) -> Simulation:
    """What the simulator says, given the median of each action's durations in these steps."""
    durations: dict[str, list[float]] = {}
    for rank in ranks:
        for step in steps:
            for action, start, end in rank.spans[step]:
                durations.setdefault(action, []).append(end - start)
    costs = {action: statistics.median(found) for action, found in durations.items()}
    latency_s, bytes_per_s = ranks[0].wire
    return simulate(
        ranks[0].batch.schedule,
        ranks[0].batch.works,
        cost=lambda action, segment: costs[str(action)],
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
    )


def _executed_s(ranks: list[RankRun], step: int) -> float:
    spans = [span for rank in ranks for span in rank.spans[step]]
    return max(end for _, _, end in spans) - min(start for _, start, _ in spans)


def _wire_speed(wire: Wire) -> tuple[float, float]:
    """(latency in seconds, bytes per second) one way between the two stages."""
    small, large = _one_way_s(wire, 8), _one_way_s(wire, _LARGE_BYTES)
    return small, _LARGE_BYTES / max(large - small, 1e-9)


def _one_way_s(wire: Wire, num_bytes: int) -> float:
    meta = TensorMeta((num_bytes,), (1,), torch.uint8, torch.device("cpu"), False)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    stage_index = smp.pp_rank()
    peer = 1 - stage_index
    times = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        for sender in (0, 1):
            transfer = wire.send(tensor, meta, peer) if sender == stage_index else wire.receive(meta, peer)
            wait_until(transfer.done, lambda: "the ping-pong")
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times)
