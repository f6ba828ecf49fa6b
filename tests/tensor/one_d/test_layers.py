"""Layers split over one axis of real ranks, against the dense ones: outputs, gradients, volumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_distributed

CASES = "tests.tensor.one_d.cases"
QUICK = [
    "operations",
    "gradients_of_gradients",
    "linear_layers",
    "a_layer_used_twice",
    "same_seed_same_layer",
    "copies_keep_their_layouts",
    "frozen_stays_frozen",
    "embeddings",
    "padding_never_matters",
    "cross_entropies",
    "attentions",
    "attention_like_torch",
    "attention_with_a_learned_mask",
    "dropout_like_dense",
    "norms",
    "checkpointed",
    "volumes",
]
WITH_DTYPES = ["linear_layers", "embeddings", "cross_entropies", "attentions", "norms"]


@pytest.mark.parametrize("case", QUICK)
def test_on_two_ranks(case: str) -> None:
    run_distributed(f"{CASES}:{case}", 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["attentions", "volumes"])
def test_on_four_ranks(case: str) -> None:
    run_distributed(f"{CASES}:{case}", 4)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("case", QUICK)
def test_on_more_ranks(case: str, size: int) -> None:
    run_distributed(f"{CASES}:{case}", size)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        pytest.param(torch.float32, 2),
        pytest.param(torch.bfloat16, 2),
        pytest.param(torch.float16, 2, marks=pytest.mark.thorough),
        pytest.param(torch.float32, 3, marks=pytest.mark.thorough),
        pytest.param(torch.bfloat16, 4, marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", WITH_DTYPES)
def test_dtypes(case: str, dtype: torch.dtype, size: int) -> None:
    run_distributed(f"{CASES}:{case}", size, kwargs={"dtype": dtype})


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_dtensor_gives_the_same(size: int, tmp_path: Path) -> None:
    run_distributed(f"{CASES}:like_dtensor", size, kwargs={"address": str(tmp_path / "store")})
