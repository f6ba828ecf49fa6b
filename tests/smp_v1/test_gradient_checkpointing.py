"""transformers' ``gradient_checkpointing_enable()``: the same to the bit, run twice, less is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.harness import run_distributed
from tests.smp_v1 import gradient_checkpointing as cases

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["losses"] == b["losses"] and all(
        torch.equal(gradient, b["gradients"][name]) for name, gradient in a["gradients"].items()
    )


def whole(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept moves the cut between the stages, so ranks hold other parameters."""
    gradients = {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()}
    return {"losses": ranks[0]["losses"], "gradients": gradients}


def one_process(**given: Any) -> dict[str, Any]:
    smp.reset()
    smp.init_in_memory({"partitions": 1, "microbatches": 2, "pipeline": "simple"})
    return cases.trained(**given)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_name", cases.MODELS)
def test_in_one_partition(model_name: str, use_reentrant: bool) -> None:
    expected = one_process(model_name=model_name, use_reentrant=None)
    found = one_process(model_name=model_name, use_reentrant=use_reentrant)
    assert same(found, expected)
    assert found["runs"] == 2 * expected["runs"] == 32  # eight blocks, two microbatches
    assert found["peak"] < 0.5 * expected["peak"]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_name", cases.MODELS)
def test_over_two_ranks(model_name: str, use_reentrant: bool) -> None:
    def run(use_reentrant: bool | None) -> list[dict[str, Any]]:
        kwargs = {"model_name": model_name, "use_reentrant": use_reentrant}
        parameters = {"partitions": 2, "microbatches": 2, "pipeline": "simple"}
        return run_distributed(f"{cases.__name__}:on_ranks", 2, kwargs=kwargs, parameters=parameters)

    expected, found = run(None), run(use_reentrant)
    assert same(whole(found), whole(expected))
    assert sum(rank["runs"] for rank in found) == 2 * sum(rank["runs"] for rank in expected) == 32
    assert max(rank["peak"] for rank in found) < 0.5 * max(rank["peak"] for rank in expected)
