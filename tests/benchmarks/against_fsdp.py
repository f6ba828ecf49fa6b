"""Sharded data parallelism against torch's FSDP2 (``fully_shard``): the same GPT, batch and AdamW.

Both run in the same ranks, one thread each: ours over MPI, torch's over gloo, every block a unit and the
rest of the model another, everything in pieces. A step is zero_grad, forward, backward and the optimizer's;
each rank has its share of the batch. Held is what is counted of parameters, gradients and optimizer state;
the peak is that of torch's allocator in a step, above what the other library's model holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import smp_lite as smp
from tests.benchmarks.beside_dense import WARM_UP_STEPS, relative_difference, step_of
from tests.benchmarks.measuring import bytes_held, bytes_of_tensors, peak, timed
from tests.benchmarks.spread import Spread, slowest_rank
from tests.benchmarks.workload import Workload, next_byte_loss
from tests.harness import run_distributed

__all__ = ["compare_in_ranks", "table"]

_TOLERANCE = 1e-5
"""Relative, of losses: what is compared must train alike."""


def table(quick: bool) -> Table:
    """Runs the comparison and describes it."""
    workloads = [Workload(128, 4, 64, 16, 1)] if quick else [Workload(d, 8, 64, 16, 1) for d in (128, 512)]
    num_pairs = 2 if quick else 10
    result = Table(
        "model",
        "ranks",
        "FSDP2 ms",
        "ours ms",
        "FSDP2 / ours",
        "held KiB: FSDP2, ours",
        "peak KiB: FSDP2, ours",
        "difference",
        title=f"Sharded data parallelism against torch's fully_shard, {num_pairs} pairs: median (quartiles); "
        "difference of losses, relative",
    )
    for workload in workloads:
        for ranks in (2, 4):
            found: list[RankRun] = run_distributed(
                f"{__name__}:compare_in_ranks",
                ranks,
                kwargs={"workload": workload, "num_pairs": num_pairs},
                timeout_s=900.0,
                fresh=True,
            )
            theirs = [run.of["FSDP2"].losses for run in found]
            wanted = [sum(losses) / ranks for losses in zip(*theirs, strict=True)]
            difference = relative_difference((run.of["ours"].losses for run in found), wanted)
            if not difference <= _TOLERANCE:
                raise RuntimeError(f"{workload}, {ranks} ranks: losses differ by {difference:.1e} relative")
            theirs_s, ours_s = (
                slowest_rank([run.of[who].seconds for run in found]) for who in ("FSDP2", "ours")
            )
            result.add_row(
                f"d {workload.d_model}, {workload.num_blocks} blocks, T {workload.length}",
                str(ranks),
                Spread.of(theirs_s).text(1e-3),
                Spread.of(ours_s).text(1e-3),
                Spread.of([other / own for other, own in zip(theirs_s, ours_s, strict=True)]).text(digits=2),
                ", ".join(f"{max(r.of[who].held for r in found) / 1024:.0f}" for who in ("FSDP2", "ours")),
                ", ".join(f"{max(r.of[who].peak for r in found) / 1024:.0f}" for who in ("FSDP2", "ours")),
                f"{difference:.1e}",
            )
    return result


@dataclass
class Measured:
    """Of one library in one rank: seconds of each step, its losses, and bytes."""

    seconds: list[float]
    losses: list[float]
    held: int = 0
    peak: int = 0


@dataclass
class RankRun:
    """What one rank measured, by library."""

    of: dict[str, Measured]


def compare_in_ranks(workload: Workload, num_pairs: int) -> RankRun:
    """Runs in every rank: alternating steps."""
    torch.set_num_threads(1)
    size = MPI.COMM_WORLD.Get_size()
    smp.init(
        {
            "partitions": 1,
            "microbatches": 1,
            "ddp": True,
            "sharded_data_parallel_degree": size,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 0.0,
        }
    )
    assert dist.get_backend() == "gloo"  # of torch.distributed, which smp.init has started
    batch = tuple(part.chunk(size)[smp.dp_rank()] for part in workload.batch())
    found = {"FSDP2": Measured([], []), "ours": Measured([], [])}
    steps: dict[str, Callable[[], float]] = {}
    for who, build in (("FSDP2", _theirs), ("ours", _ours)):
        elsewhere = bytes_of_tensors()
        step, held = build(workload, batch, size)
        steps[who] = step
        found[who].losses += [step() for _ in range(WARM_UP_STEPS)]
        found[who].held = held()

        def noted(step: Callable[[], float] = step, measured: Measured = found[who]) -> None:
            measured.losses.append(step())

        found[who].peak = peak(noted, elsewhere)
    for _ in range(num_pairs):
        for who, step in steps.items():
            found[who].seconds.append(timed(lambda: found[who].losses.append(step())))  # noqa: B023
    return RankRun(found)


def _theirs(
    workload: Workload, batch: Sequence[Tensor], size: int
) -> tuple[Callable[[], float], Callable[[], int]]:
    model = workload.model()
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = batch

    def step() -> float:
        optimizer.zero_grad()
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return float(loss)

    def held() -> int:
        parts = []
        for parameter in model.parameters():
            local = _local(parameter).detach()
            local.grad = _local(parameter.grad) if parameter.grad is not None else None
            parts.append(local)
        state = {
            number: {key: _local(value) for key, value in own.items()}
            for number, own in enumerate(optimizer.state.values())
        }
        return bytes_held(parts, {"state": state})

    return step, held


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _ours(
    workload: Workload, batch: Sequence[Tensor], size: int
) -> tuple[Callable[[], float], Callable[[], int]]:
    model = smp.DistributedModel(workload.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_byte_loss(model(tokens), targets)

    def held() -> int:
        return bytes_held(model.local_parameters(), optimizer.local_state_dict())

    return step_of(model, optimizer, batch, loss_of), held
