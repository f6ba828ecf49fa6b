"""What the ranks of an MPI job run for these tests; called by name through `tests.harness`."""

from __future__ import annotations

import os
from typing import Any

import torch

import smp_lite as smp
from tests.models import CASES
from tests.transparency.comparison import NUM_SAMPLES, compare, differences, smp_run, too_large
from tests.transparency.training.replicas import half, replica_runs

__all__ = ["compare_case", "compare_replicas", "keep_values"]


def compare_case(name: str, placement: str, wire: str = "mpi") -> tuple[list[str], list[str]]:
    """Trains a case and compares what this rank holds with plain torch.

    Returns:
        What is wrong, and the parameters that this rank holds.
    """
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    case = CASES[name]
    wrong = too_large(case, compare(case, placement))
    return wrong, [name for name, _ in smp.state.model.local_named_parameters()]


def compare_replicas(
    name: str,
    *,
    num_steps: int = 2,
    optimizer_every: int = 1,
    gradient_scale: float = 1.0,
    comm_hook: bool = False,
    wire: str = "mpi",
    **model_options: Any,
) -> tuple[int, list[str], int]:
    """Trains a case on two dp ranks and compares with two plain replicas.

    Returns:
        This rank's dp rank, what is wrong, and how many buckets were reduced during the last
        backward.
    """
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    case = CASES[name]
    replica = smp.dp_rank()
    ours = smp_run(
        case,
        num_steps=num_steps,
        num_samples=2 * NUM_SAMPLES,
        batch_of=lambda batch: half(batch, replica),
        optimizer_every=optimizer_every,
        prepare=_register_hook if comm_hook else None,
        **model_options,
    )
    plain = replica_runs(
        case,
        num_steps=num_steps,
        optimizer_every=optimizer_every,
        gradient_scale=gradient_scale,
        device=smp.state.device,
    )[replica]
    found = []
    for step_index, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        found += differences(mine, theirs, step_index)
    return replica, too_large(case, found), smp.state.model.runtime.reducer.started_in_backward


def _register_hook(model: smp.DistributedModel) -> None:
    """A hook that averages over dp ranks and microbatches itself, as the API asks."""

    def average(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer().div_(smp.state.cfg.microbatches * smp.dp_size())
        work = torch.distributed.all_reduce(flat, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(smp.get_dp_process_group(), average)


class _Lingers(torch.nn.Linear):
    """Its frame, and with it its callers', lives until Python collects garbage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise LookupError
        except LookupError as error:
            caught = error  # noqa: F841  its traceback has this frame
        return super().forward(x)


def keep_values(on: list[int], num_steps: int) -> tuple[list[bool], list[str]]:
    """Some ranks keep a value of each microbatch that the step function does not return.

    Returns:
        Whether what is read of them after each step is right, and the errors of those that have no data.
    """
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), _Lingers(4, 4)))
    kept: list[torch.Tensor] = []

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        model.backward(output.mean())
        doubled = output.detach() * 2.0
        if smp.rank() in on:
            kept.append(doubled)
        return output

    right, texts = [], []
    for number in range(num_steps):
        kept.clear()
        outputs = step(model, torch.full((8, 4), float(number))).outputs
        for value, output in zip(kept, outputs, strict=False):
            try:
                right.append(torch.equal(value + 0.0, output * 2.0))
            except smp.SMPError as error:
                texts.append(str(error))
    return right, texts
