"""One transformer split in six ways: what a rank receives, what it holds, and how long a step takes.

Received is what collectives must bring at least, counted in one step after the first ones, in which ranks
also compare what they have alike. Held is what is counted of parameters, gradients and optimizer state. The
peak is that of torch's allocator in a step: what the process held for tensors when it began, and what was
then allocated. A step is zero_grad, forward, backward and AdamW, one thread a process. It alternates with a
step of the dense model on the same batch, in the process of rank 0 while the others sleep; a sharded model's
ranks have equal shares of that batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table

import smp_lite as smp
from smp_lite.session import current
from tests.benchmarks.beside_dense import (
    WARM_UP_STEPS,
    BesideDense,
    RankMemory,
    alternate,
    largest_difference,
    step_of,
)
from tests.benchmarks.measuring import bytes_held, bytes_of_tensors, peak
from tests.benchmarks.split_transformer import Split, SplitWorkload, optimizer_of
from tests.benchmarks.spread import Spread, slowest_rank
from tests.benchmarks.traffic import Traffic
from tests.harness import run_distributed

__all__ = ["measure_dense", "measure_in_ranks", "table"]

_SPLITS = (
    Split("1d", 4),
    Split("2d", 4),
    Split("sequence", 4),
    Split("sharded", 4),
    Split("1d", 8),
    Split("2.5d", 8, depth=2),
    Split("3d", 8),
    Split("sequence", 8),
    Split("sharded", 8),
)
_TOLERANCE = 1e-4
"""Relative, of losses. What is compared must train alike."""


def table(quick: bool) -> Table:
    """Runs every split beside the dense model and describes them."""
    workload = SplitWorkload(256, 8, 2, 64, 16)
    num_pairs = 10
    if quick:
        workload, num_pairs = SplitWorkload(64, 8, 2, 32, 8), 2
    result = Table(
        "ranks",
        "split",
        "received",
        "gradients",
        "held",
        "peak",
        "dense ms",
        "split ms",
        "split / dense",
        "difference",
        title=f"A transformer in parts, {workload}: KiB of the rank with most in a step, of it received for "
        f"sums of gradients; times of {num_pairs} pairs: median (quartiles); difference of losses",
    )
    kwargs = {"workload": workload}
    (dense,) = run_distributed(f"{__name__}:measure_dense", 1, kwargs=kwargs, timeout_s=300.0)
    memory = (f"{num_bytes / 1024:.0f}" for num_bytes in (dense.held, dense.peak))
    result.add_row("1", "dense", "0", "0", *memory)
    for split in _SPLITS:
        ranks: list[RankRun] = run_distributed(
            f"{__name__}:measure_in_ranks",
            split.ranks,
            kwargs={"workload": workload, "split": split, "num_pairs": num_pairs},
            timeout_s=900.0,
        )
        difference = largest_difference(ranks)
        if not difference <= _TOLERANCE:
            raise RuntimeError(f"{split} on {split.ranks} ranks: losses differ by {difference:.1e} relative")
        dense_s, split_s = ranks[0].dense_s, slowest_rank([rank.own_s for rank in ranks])
        most = max(ranks, key=lambda rank: rank.layers + rank.gradients)
        result.add_row(
            str(split.ranks),
            str(split),
            f"{(most.layers + most.gradients) / 1024:.0f}",
            f"{most.gradients / 1024:.0f}",
            f"{max(rank.held for rank in ranks) / 1024:.0f}",
            f"{max(rank.peak for rank in ranks) / 1024:.0f}",
            f"{Spread.of(dense_s).median * 1e3:.0f}",
            f"{Spread.of(split_s).median * 1e3:.0f}",
            Spread.of([own / one for own, one in zip(split_s, dense_s, strict=True)]).text(digits=2),
            f"{difference:.1e}",
        )
    return result


@dataclass(frozen=True)
class RankRun(BesideDense):
    """What one rank measured, and bytes received in one step by what they were for."""

    layers: int
    gradients: int


def measure_dense(workload: SplitWorkload) -> RankMemory:
    """Runs in one process: the dense model's memory."""
    torch.set_num_threads(1)
    elsewhere = bytes_of_tensors()
    step, held = _dense_step(workload)
    for _ in range(WARM_UP_STEPS):
        step()
    return RankMemory(held(), peak(step, elsewhere))


def measure_in_ranks(workload: SplitWorkload, split: Split, num_pairs: int) -> RankRun:
    """Runs in every rank: counts, then alternates."""
    torch.set_num_threads(1)
    elsewhere = bytes_of_tensors()
    # Names of parameters alone: the model itself is made by each rank when it knows its part.
    with torch.device("meta"):
        smp.init(split.config(workload.dense()))
    traffic = Traffic(current(), torch.finfo(torch.get_default_dtype()).bits // 8)
    step, held = _split_step(workload, split)
    losses = [step() for _ in range(WARM_UP_STEPS)]
    before = traffic.layers(), traffic.gradients()
    losses.append(step())
    layers, gradients = traffic.layers() - before[0], traffic.gradients() - before[1]
    held_bytes = held()
    peak_bytes = peak(lambda: losses.append(step()), elsewhere)

    dense = _dense_step(workload)[0] if smp.rank() == 0 else lambda: 0.0
    pairs = alternate(step, dense, losses, num_pairs)
    return RankRun(held_bytes, peak_bytes, **pairs, layers=layers, gradients=gradients)


def _split_step(workload: SplitWorkload, split: Split) -> tuple[Callable[[], float], Callable[[], int]]:
    """(a step that returns this rank's loss, bytes that this rank holds)."""
    net, loss_of = workload.split(split)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    batch = workload.batch()
    if split.has_own_batches:
        batch = tuple(part.chunk(smp.rdp_size())[smp.rdp_rank()] for part in batch)

    def held() -> int:
        return bytes_held(model.local_parameters(), optimizer.local_state_dict())

    return step_of(model, optimizer, batch, loss_of), held


def _dense_step(workload: SplitWorkload) -> tuple[Callable[[], float], Callable[[], int]]:
    """The same in plain torch."""
    model = workload.dense()
    optimizer = optimizer_of(model.parameters())
    ids, targets = workload.batch()

    def step() -> float:
        optimizer.zero_grad()
        loss = workload.dense_loss(model, ids, targets)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step, lambda: bytes_held(model.parameters(), optimizer.state_dict())
