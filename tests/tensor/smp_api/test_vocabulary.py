"""A vocabulary that is split over the ranks: the language model computes what the dense one does."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.hf_models import ODD
from tests.tensor.smp_api.test_modules import check, parameters_of

MORE = [("gpt2", False), ("gptj", True)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("model", "prescaled"),
    [("gpt2", True), ("gptj", False), *(pytest.param(*way, marks=pytest.mark.thorough) for way in MORE)],
)
def test_it_trains_as_the_dense_one(model: str, prescaled: bool) -> None:
    check(f"vocabulary {model}", 2, parameters_of(2, prescaled, "memory"), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("prescaled", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_over_two_stages(prescaled: bool) -> None:
    check("vocabulary gpt2", 4, parameters_of(2, prescaled, "speed", partitions=2), torch.float32)


def test_parts_and_ends() -> None:
    for found in run_distributed("tests.tensor.smp_api.cases:vocabulary", 2):
        rows = math.ceil(ODD / 2)
        assert found["shapes"] == {"word": [rows, 16], "head": [rows, 16], "whole": [ODD, 16]}
        assert found["tied"] and found["padding"] == 0.0
        assert found["gathered"] < ODD  # numbers that the ranks compare, and no logits
        assert found["is_nan"]
        assert found["said"].startswith(f"IndexError: DistributedTransformerLMHead: id {ODD} is not in")
