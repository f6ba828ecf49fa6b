"""A step of smp_lite over MPI against one of torch.distributed.pipelining over gloo.

Both run in the same two processes with one thread each, on the same weights and the same batch,
split into the same halves. A step is zero_grad, forwards and backwards, without an optimizer. Torch
is told to keep no outputs, since the other side returns losses only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import smp_lite as smp
from notebooks.gpt import GPT
from tests.benchmarks.spread import Spread, slowest_rank
from tests.benchmarks.workload import Workload, next_byte_loss, train_step
from tests.harness import run_distributed

__all__ = ["compare_in_ranks", "table"]

_NUM_STAGES = 2
_WARM_UP_STEPS = 3
_TOLERANCE = 1e-6
"""Times are worth comparing only where both sides compute the same."""
_SCHEDULES = {"interleaved": Schedule1F1B, "simple": ScheduleGPipe}
"""Our `pipeline` -> torch's schedule of the same order."""


def table(quick: bool) -> Table:
    """Runs the comparison and describes it."""
    # (workload, number of pairs)
    plan = [(Workload(128, 8, 64, 16), 20), (Workload(512, 8, 256, 16), 10)]
    if quick:
        plan = [(Workload(64, 4, 32, 16), 4)]
    result = Table(
        "workload",
        "schedule",
        "pairs",
        "torch ms",
        "smp_lite ms",
        "smp_lite / torch",
        "largest difference of losses, gradients",
        title="Step time against torch.distributed.pipelining, 2 ranks, M 8: median (quartiles)",
    )
    for workload, num_pairs in plan:
        for pipeline, schedule in _SCHEDULES.items():
            found = _compare(workload, pipeline, num_pairs)
            ours = slowest_rank([rank.ours_s for rank in found])
            theirs = slowest_rank([rank.theirs_s for rank in found])
            ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
            result.add_row(
                str(workload),
                f"{schedule.__name__}, {pipeline}",
                str(num_pairs),
                Spread.of(theirs).text(1e-3),
                Spread.of(ours).text(1e-3),
                Spread.of(ratios).text(digits=3),
                f"{max(rank.loss_difference for rank in found):.1e}, "
                f"{max(rank.gradient_difference for rank in found):.1e}",
            )
    return result


@dataclass(frozen=True)
class RankTimes:
    """One rank's step times, and how far its results lie from torch's (relative)."""

    ours_s: list[float]
    theirs_s: list[float]
    loss_difference: float
    gradient_difference: float


def _compare(workload: Workload, pipeline: str, num_pairs: int) -> list[RankTimes]:
    with TemporaryDirectory() as directory:
        found: list[RankTimes] = run_distributed(
            f"{__name__}:compare_in_ranks",
            _NUM_STAGES,
            kwargs={
                "workload": workload,
                "pipeline": pipeline,
                "num_pairs": num_pairs,
                "store": str(Path(directory, "store")),
            },
            timeout_s=900.0,
        )
    difference = max(max(rank.loss_difference, rank.gradient_difference) for rank in found)
    if not difference <= _TOLERANCE:
        raise RuntimeError(f"{workload}, {pipeline}: results differ by {difference:.1e} relative")
    return found


def compare_in_ranks(workload: Workload, pipeline: str, num_pairs: int, store: str) -> RankTimes:
    """Runs in both ranks: alternating steps, then a check that both computed the same."""
    torch.set_num_threads(1)
    smp.init(workload.parameters(_NUM_STAGES, pipeline))
    rank = smp.rank()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, _NUM_STAGES), rank=rank, world_size=_NUM_STAGES
    )
    try:
        theirs, their_stage = _torch_step(workload, pipeline, rank)
        ours, our_model = _smp_step(workload)
        for _ in range(_WARM_UP_STEPS):
            theirs()
            ours()
        theirs_s, ours_s = [], []
        for _ in range(num_pairs):
            theirs_s.append(_timed(theirs))
            ours_s.append(_timed(ours))
        their_losses, our_losses = theirs(), ours()
    finally:
        dist.destroy_process_group()
    loss_difference = 0.0
    if rank == _NUM_STAGES - 1:  # torch knows the losses on the last rank only
        loss_difference = _relative_difference(our_losses, torch.stack(their_losses))
    gradients = {
        name: parameter.grad
        for name, parameter in our_model.local_named_parameters()
        if parameter.grad is not None
    }
    gradient_difference = max(
        _relative_difference(gradients[name], parameter.grad)
        for name, parameter in their_stage.gpt_named_parameters()
    )
    return RankTimes(ours_s, theirs_s, loss_difference, gradient_difference)


def _timed(step: Callable[[], Any]) -> float:
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _relative_difference(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _smp_step(workload: Workload) -> tuple[Callable[[], Tensor], smp.DistributedModel]:
    model = workload.distributed(_NUM_STAGES)
    tokens, targets = workload.batch()
    step = train_step([])

    def run() -> Tensor:
        model.zero_grad()
        return step(model, tokens, targets).stack()

    return run, model


def _torch_step(workload: Workload, pipeline: str, rank: int) -> tuple[Callable[[], list[Tensor]], GPTStage]:
    module = GPTStage(workload, rank)
    stage = PipelineStage(module, rank, _NUM_STAGES, torch.device("cpu"))
    schedule = _SCHEDULES[pipeline](stage, workload.num_microbatches, loss_fn=next_byte_loss)
    tokens, targets = workload.batch()

    def run() -> list[Tensor]:
        losses: list[Tensor] = []
        module.zero_grad()
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        return losses

    return run, module


class GPTStage(nn.Module):
    """One half of the GPT, cut by hand as torch's pipeline needs it."""

    def __init__(self, workload: Workload, stage_index: int) -> None:
        super().__init__()
        self.gpt: GPT = workload.model()
        self.is_first, self.is_last = stage_index == 0, stage_index == _NUM_STAGES - 1
        self.block_indices = [
            index
            for index in range(workload.num_blocks)
            if workload.stage_of_block(index, _NUM_STAGES) == stage_index
        ]
        keep = {f"blocks.{index}." for index in self.block_indices}
        keep |= {"token_embedding.", "position_embedding."} if self.is_first else set()
        keep |= {"norm.", "head."} if self.is_last else set()
        self._own = {
            name: parameter for name, parameter in self.gpt.named_parameters() if name.startswith(tuple(keep))
        }

    def gpt_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This half's parameters under the names that they have in the whole model."""
        return list(self._own.items())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        gpt = self.gpt
        if self.is_first:
            positions = torch.arange(x.shape[1])
            x = gpt.token_embedding(x) + gpt.position_embedding(positions)
        for index in self.block_indices:
            x = gpt.blocks[index](x)
        return gpt.head(gpt.norm(x)) if self.is_last else x
