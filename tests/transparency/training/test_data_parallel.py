"""Two stages times two replicas, against two plain replicas that average their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.harness import run_distributed
from tests.models import CASES
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.training.replicas import replica_runs

pytestmark = pytest.mark.sampled(3)

NAMES = [
    "gpt",
    "gpt_tied",
    "batchnorm",
    "reuse",
    "unused",
    "layer_drop",
    "complex64",
    "autocast_part",
]


def check(
    name: str, parameters: dict[str, Any] | None = None, **options: Any
) -> list[tuple[int, list[str], int]]:
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "ddp": True, **(parameters or {})}
    found = run_distributed(
        "tests.transparency.ranks:compare_replicas",
        4,
        kwargs={"name": name, **options},
        parameters=config,
    )
    assert [wrong for _, wrong, _ in found] == [[]] * 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ddp(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "batchnorm", "data_branch", "complex64"])
def test_horovod(name: str) -> None:
    check(name, {"ddp": False, "horovod": True})


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "dp_ranks"), [("cluster", [0, 0, 1, 1]), ("spread", [0, 1, 0, 1])])
def test_either_placement_of_ranks(placement: str, dp_ranks: list[int]) -> None:
    found = check("gpt", {"placement_strategy": placement})
    assert [dp_rank for dp_rank, _, _ in found] in (dp_ranks, [1 - r for r in dp_ranks])


def test_parameters_that_one_replica_uses() -> None:
    first, second = replica_runs(CASES["data_branch"], num_steps=1, optimizer_every=2)
    used = [{n for n, g in run[0].gradients.items() if g is not None} for run in (first, second)]
    assert used[0] != used[1], "each replica is meant to take a branch of its own"
    check("data_branch")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "data_branch", "unused"])
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.0005},
        {"overlapping_allreduce": False},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
        {"average_grads_across_microbatches": False, "gradient_scale": float(NUM_MICROBATCHES)},
        {"comm_hook": True, "bucket_cap_mb": 0.002},
        {"backward_passes_per_step": 2, "optimizer_every": 2, "num_steps": 4},
        {
            "backward_passes_per_step": 2,
            "optimizer_every": 2,
            "num_steps": 4,
            "gradient_as_bucket_view": True,
        },
    ],
    ids=lambda options: "-".join(options),
)
def test_reduction_options(name: str, options: dict[str, Any]) -> None:
    check(name, **options)


@pytest.mark.slow
def test_small_buckets_are_reduced_while_backward_runs() -> None:
    assert all(started > 1 for _, _, started in check("gpt", bucket_cap_mb=0.0005))
    assert all(started == 0 for _, _, started in check("gpt", overlapping_allreduce=False))


@pytest.mark.parametrize("name", ["gpt", "data_branch"])
def test_everything_over_process_groups(name: str) -> None:
    check(name, wire="c10d")


def test_a_parameter_that_trains_too_late_is_refused_on_all_ranks() -> None:
    """Those of other stages do not wait for it."""
    texts = run_distributed(
        "tests.transparency.training.test_data_parallel:unfreeze",
        4,
        parameters={"partitions": 2, "microbatches": 2, "ddp": True},
    )
    assert all("parameter '1.weight' was frozen when reductions were set up" in text for text in texts)


def unfreeze() -> str:
    """On each rank: what it is told."""
    smp.init()
    try:
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        net[1].weight.requires_grad_(False)
        model = smp.DistributedModel(net)

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        step(model, torch.ones(4, 6))
        net[1].weight.requires_grad_(True)
        with pytest.raises(smp.SMPError) as told:
            step(model, torch.ones(4, 6))
        return str(told.value)
    finally:
        smp.reset()
