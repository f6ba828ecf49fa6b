"""What callbacks decide on one rank, and data that differs between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_distributed
from tests.integrations.comparing import CASES

PIPELINE = {"partitions": 2}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_that_stops_one_rank_stops_all(tmp_path: Path, rank: int) -> None:
    found = run_distributed(
        f"{CASES}:stopped_by",
        2,
        kwargs={"parameters": PIPELINE, "folder": str(tmp_path), "rank": rank},
    )
    # It asks for a checkpoint in step 2, and to stop in step 3.
    assert found == [(3, ["checkpoint-2"], 2)] * 2


@pytest.mark.thorough
def test_early_stopping_by_a_metric_that_differs_between_ranks(tmp_path: Path) -> None:
    found = run_distributed(
        f"{CASES}:stopped_early", 2, kwargs={"parameters": PIPELINE, "folder": str(tmp_path)}
    )
    assert found[0] == found[1] and found[0] < 8


def test_datasets_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    for told in run_distributed(
        f"{CASES}:other_rows", 2, kwargs={"parameters": PIPELINE, "folder": str(tmp_path)}
    ):
        assert "the Trainer's batch differs between rank 0 and rank 1" in told


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("learning_rate", "TrainingArguments.learning_rate is 0.01 on rank 0 and 0.5 on rank 1"),
        ("rows", "the number of batches of train_dataset is 4 on rank 0 and 5 on rank 1"),
        ("eval_rows", "the number of rows is 7 on rank 0 and 5 on rank 1"),
    ],
)
def test_what_rank_1_is_given_otherwise_is_named(tmp_path: Path, what: str, named: str) -> None:
    for told in run_distributed(
        f"{CASES}:told_of", 2, kwargs={"parameters": PIPELINE, "folder": str(tmp_path), "what": what}
    ):
        assert named in told


def test_one_rank_prints_and_writes(tmp_path: Path) -> None:
    found = run_distributed(f"{CASES}:roles", 2, kwargs={"parameters": PIPELINE, "folder": str(tmp_path)})
    assert found == [(True, True, True), (False, False, False)]
