"""Weights of other stages between steps: averages are right, the whole is to be had, all else says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.harness import run_distributed
from tests.models.layers import WIDTH, Chain
from tests.transparency.conftest import OpenSession

pytestmark = pytest.mark.sampled(3)


def on_ranks(function: str, num_ranks: int = 2) -> list[Any]:
    return run_distributed(
        f"tests.transparency.training.whole_models:{function}",
        num_ranks,
        parameters={"partitions": num_ranks, "microbatches": 2},
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "function",
    ["average_from_before", "average_from_the_first_step", "averaged_model", "shadow_dict", "whole_on_all"],
)
def test_right_on_ranks(function: str, num_ranks: int) -> None:
    assert on_ranks(function, num_ranks) == [[]] * num_ranks


def test_the_whole_model_on_one_rank() -> None:
    found = on_ranks("whole_on_one")
    assert [reading for reading, _ in found] == [[], []]
    assert [len(changing) for _, changing in found] == [0, 1]
    assert "changed within smp.gathered(rank=1)" in found[1][1][0]


@pytest.mark.host
def test_every_other_use_says_what_the_tensors_are() -> None:
    for found in on_ranks("uses"):
        for name, text in found.items():
            assert "lives on stage" in text, name
            assert "smp.gathered(model)" in text, name
        assert "or a copy of it that is given instead" in found["an average"]


def test_in_one_process_all_is_there(open_session: OpenSession) -> None:
    open_session(2)
    model = smp.DistributedModel(Chain())
    step = smp.step(lambda model, x: model(x).sum())
    step(model, torch.zeros(8, WIDTH))
    with smp.gathered(model) as module:
        assert module is model.module
        assert torch.equal(model(torch.zeros(2, WIDTH)), module(torch.zeros(2, WIDTH)))
        with pytest.raises(smp.SMPError, match=r"leave it first"):
            step(model, torch.zeros(8, WIDTH))
    with pytest.raises(smp.SMPError, match="outside a function decorated"):
        model(torch.zeros(2, WIDTH))
