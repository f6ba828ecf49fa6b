"""An input that requires a gradient gets it on every mp rank, and so do parameters outside of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.harness import run_distributed
from tests.models.layers import WIDTH, Chain
from tests.transparency.conftest import OpenSession
from tests.transparency.values.inputs import differences


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_in_memory(num_stages: int, pipeline: str, open_session: OpenSession) -> None:
    open_session(num_stages, microbatches=2, pipeline=pipeline)
    assert differences() == []


@pytest.mark.ci
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_on_ranks(num_ranks: int) -> None:
    found = run_distributed(
        "tests.transparency.values.inputs:differences_on_rank",
        num_ranks,
        parameters={"partitions": num_ranks, "microbatches": 2},
    )
    assert found == [[]] * num_ranks


def test_set_partition_after_wrapping_with_one_partition(open_session: OpenSession) -> None:
    open_session(1, auto_partition=False, default_partition=0)
    model = smp.DistributedModel(Chain())
    smp.set_partition(model.module.head, 0)


def test_a_gradient_that_is_looked_at_before_it_is_there(open_session: OpenSession) -> None:
    """In one process it is there by then, that of earlier microbatches too."""
    open_session(2)
    model = smp.DistributedModel(Chain())
    scale = torch.ones(1, requires_grad=True)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        assert scale.grad is None
        output = model(x * scale)
        model.backward(output.mean())
        return output * (2.0 if scale.grad is not None else 1.0)

    with pytest.raises(smp.SMPError, match="was looked at inside an smp"):
        step(model, torch.ones(8, WIDTH))
