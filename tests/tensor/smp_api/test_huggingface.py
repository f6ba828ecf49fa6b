"""transformers' models on distributed modules train as they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tensor.smp_api.hf_models import KINDS, MODELS
from tests.tensor.smp_api.test_modules import check, parameters_of

pytestmark = pytest.mark.sampled(3)


def some(*quick: str) -> list[Any]:
    """All models; those that are not named only in thorough runs."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]


@pytest.mark.parametrize("model", some("gpt2", "gptj", "gptneo", "bert"))
def test_a_model_trains_as_the_dense_one(model: str) -> None:
    found = check(f"hf {model}", 2, parameters_of(2, True, "speed"), torch.float32)
    assert KINDS[model] in found[0]["kinds"]


@pytest.mark.parametrize("optimize", ["speed", pytest.param("memory", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("model", some("gptj", "bert classes"))
def test_with_batches_of_their_own(model: str, optimize: str) -> None:
    check(f"hf {model}", 2, parameters_of(2, False, optimize), torch.float32)


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_at_degree_one(model: str) -> None:
    found = check(f"hf {model}", 1, parameters_of(1, True, "memory"), torch.float32)
    assert KINDS[model] in found[0]["kinds"]


@pytest.mark.slow
@pytest.mark.parametrize("prescaled", [pytest.param(True, marks=pytest.mark.thorough), False])
@pytest.mark.parametrize(
    "model", ["gpt2", pytest.param("gpt2 blocks", marks=pytest.mark.thorough), "roberta"]
)
def test_over_two_stages(model: str, prescaled: bool) -> None:
    check(f"hf {model}", 4, parameters_of(2, prescaled, "memory", partitions=2), torch.float32)
