"""Sequence-parallel layers on real ranks: each against its dense form on whole sequences, gradients too."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.harness import run_distributed

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.sequence.cases"
RANKS = [2, 4]
WAYS = ["ring", "all_to_all"]
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.thorough)]


@pytest.mark.ci
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "in-order"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_attention_equals_the_formula(way: str, dtype: torch.dtype, zigzag: bool, ranks: int) -> None:
    run_distributed(f"{CASES}:attention", ranks, kwargs={"way": way, "dtype": dtype, "zigzag": zigzag})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_large_scores(way: str, ranks: int) -> None:
    run_distributed(f"{CASES}:large_scores", ranks, kwargs={"way": way})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "in-order"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_equal_the_dense_ones(dtype: torch.dtype, zigzag: bool, ranks: int) -> None:
    run_distributed(f"{CASES}:layers", ranks, kwargs={"dtype": dtype, "zigzag": zigzag})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exchange", WAYS)
def test_attention_layer_equals_the_dense_one(exchange: str, dtype: torch.dtype, ranks: int) -> None:
    run_distributed(f"{CASES}:attention_layer", ranks, kwargs={"exchange": exchange, "dtype": dtype})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary_split", [False, True])
def test_loss(vocabulary_split: bool, dtype: torch.dtype, ranks: int) -> None:
    kwargs = {"vocabulary_split": vocabulary_split, "dtype": dtype}
    run_distributed(f"{CASES}:loss", ranks, kwargs=kwargs)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize(
    ("recompute", "vocabulary_split"),
    [("nothing", True), ("blocks", False), pytest.param("reentrant", True, marks=pytest.mark.thorough)],
)
def test_transformer(
    exchange: str, dtype: torch.dtype, ranks: int, recompute: str, vocabulary_split: bool
) -> None:
    kwargs = {"exchange": exchange, "dtype": dtype, "recompute": recompute}
    run_distributed(f"{CASES}:transformer", ranks, kwargs={**kwargs, "vocabulary_split": vocabulary_split})


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_received(ranks: int) -> None:
    part = Fraction(2 * 4 * 16 * 8, ranks)  # of queries, as of keys, of values and of the result
    for found in run_distributed(f"{CASES}:volumes", ranks, kwargs={"way": "ring"}):
        assert found["forward"] == (ranks - 1) * 2 * part
        assert found["backward"] == (ranks - 1) * 2 * part + ranks * 2 * part
    for found in run_distributed(f"{CASES}:volumes", ranks, kwargs={"way": "all_to_all"}):
        assert found["forward"] == found["backward"] == Fraction(ranks - 1, ranks) * 4 * part


def test_low_precision() -> None:
    run_distributed(f"{CASES}:low_precision", 4)
