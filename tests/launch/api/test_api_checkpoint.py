"""Checkpoints on real ranks: 2 partitions, and 2 partitions with 2 replicas in both placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api_support import same
from tests.harness import run_distributed

CASES = "tests.launch.api.api_checkpoint_cases:"
MANUAL = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}


def run(case: str, world_size: int, strategy: str = "cluster", **kwargs: Any) -> list[Any]:
    parameters = {**MANUAL, "placement_strategy": strategy, "ddp": world_size > 2}
    return run_distributed(f"{CASES}{case}", world_size, kwargs=kwargs, parameters=parameters)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("world_size", "strategy", "steps_before", "by_tag"),
    [
        (2, "cluster", 0, True),
        (2, "cluster", 1, False),
        (4, "cluster", 0, False),
        (4, "spread", 1, True),
    ],
)
def test_training_goes_on_from_a_partial_checkpoint_to_the_bit(
    tmp_path: Path, world_size: int, strategy: str, steps_before: int, by_tag: bool
) -> None:
    found = run(
        "resume",
        world_size,
        strategy,
        directory=str(tmp_path),
        steps_before=steps_before,
        by_tag=by_tag,
    )
    files = ["model_0.pt", "model_1.pt", "optimizer_0.pt", "optimizer_1.pt"]
    files += ["partition.json", "user_content.pt"]
    for seen in found:
        assert seen["content"] == {"step": 3}
        assert seen["losses"]
        assert seen["states"]
        assert seen["files"] == [f"three_partial/{file}" for file in files]


@pytest.mark.ci
def test_a_full_checkpoint_is_a_plain_models_file_both_ways(tmp_path: Path) -> None:
    for seen in run("full_checkpoint", 4, directory=str(tmp_path)):
        assert seen.pop("content") == [1]
        assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize("steps_before", [0, 1], ids=["before partition", "after"])
def test_a_full_checkpoint_resumes_on_any_number_of_partitions_to_the_bit(
    tmp_path: Path, steps_before: int
) -> None:
    losses = run("save_full", 2, directory=str(tmp_path))
    for ranks, last in ((1, ""), (2, "last.1"), (2, ""), (3, "last.1")):
        resumed = run_distributed(
            f"{CASES}resume_full",
            ranks,
            kwargs={"directory": str(tmp_path), "steps_before": steps_before, "last": last},
            parameters={**MANUAL, "partitions": ranks},
        )
        assert same(resumed, [losses[0]] * ranks)


def test_ranks_do_not_resume_from_different_saves(tmp_path: Path) -> None:
    first, second = run("mixtures", 2, directory=str(tmp_path))
    for said in (first, second):
        assert "the ranks found different saves of 'b_partial'" in said["b"]
        assert "'b' at step 2" in said["b"] and "'a' at step 1" in said["b"]
        for key in ("resumed tags", "saved tags"):
            assert said[key].startswith("SMPMismatch")
            assert "rank 1" in said[key] and "rank 0" in said[key]
        assert "model and optimizer is ['model', 'optimizer'] on rank 1" in said["parts"]
        assert "d_partial' does not exist" in said["none"]
        assert said["a"] == ""
    assert "optimizer_1.pt' is missing: it is a part of save" in second["c"]
    assert "rank 1 says: SMPError: " in first["c"] and "optimizer_1.pt' is missing" in first["c"]


def test_state_that_waits_for_the_first_step_is_not_given_out() -> None:
    for first, second, later in run("waiting_state", 2):
        assert "waits for the first step" in first
        assert "waits for the first step" in second
        assert later == ""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("is_partial", "rank"), [(True, 1), (True, 0), (False, 0)])
def test_where_one_rank_cannot_write_all_say_so_and_the_old_checkpoint_stays(
    tmp_path: Path, is_partial: bool, rank: int
) -> None:
    found = run("disk_full", 2, directory=str(tmp_path), is_partial=is_partial, rank=rank)
    for number, seen in enumerate(found):
        said = seen.pop("said")
        assert "could not be written (OSError: [Errno 27] File too large)" in said
        assert (f"model_{rank}.pt'" if is_partial else "/t'") in said
        assert number == rank or f"save_checkpoint failed on rank(s) {rank}" in said
        assert seen == {"files": True, "old": True, "later": ""}


@pytest.mark.slow
def test_hosts_may_have_disks_of_their_own(tmp_path: Path) -> None:
    for rank, seen in enumerate(run("own_disks", 2, directory=str(tmp_path))):
        parts = [f"model_{rank}.pt", f"optimizer_{rank}.pt", "partition.json"]
        assert seen["files"] == ["newest", *(f"u_partial/{part}" for part in parts)]
        assert seen["resumed"] == [True, True]


def test_parts_saved_on_dp_rank_0_are_loaded_on_all_ranks(tmp_path: Path) -> None:
    for seen in run("save_and_load", 4, directory=str(tmp_path)):
        assert seen == {"mine": True, "equal": True, "files": ["part.pt_0", "part.pt_1"]}


def test_parameters_that_a_group_lists_twice_have_the_numbers_of_torch_and_resume(tmp_path: Path) -> None:
    for seen in run("listed_twice", 2, directory=str(tmp_path)):
        assert seen == {"whole": True, "losses": True}
