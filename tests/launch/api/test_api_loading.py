"""Loading on two ranks is loading in one process: modules' own code, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed

MANUAL = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}


def run(case: str, folder: Path, **kwargs: Any) -> list[Any]:
    return run_distributed(
        f"tests.launch.api.api_loading_cases:{case}",
        2,
        kwargs={"folder": str(folder), **kwargs},
        parameters=MANUAL,
    )


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("steps_before", [0, 1], ids=["before partition", "after"])
@pytest.mark.parametrize("form", ["partial", "full", "portable"])
def test_modules_load_by_code_of_their_own(tmp_path: Path, form: str, steps_before: int) -> None:
    assert run("own_code", tmp_path, form=form, steps_before=steps_before) == [True, True]


def test_versions_and_older_names_are_those_of_plain_files(tmp_path: Path) -> None:
    for found in run("plain_files", tmp_path):
        assert all(found.values()), found


@pytest.mark.ci
def test_a_part_of_another_model_is_refused_and_not_trained_with(tmp_path: Path) -> None:
    first, last = run("other_models", tmp_path)
    lacks = "missing keys [], unknown keys ['last.3.running_mean', 'last.3.running_var', 'last.3.num_batches"
    for found in (first, last):
        assert lacks in found["after a step"] and lacks in found["before"]
        assert "size mismatch for last.3.weight" in found["shape"][0]
        for key in ("lacking", "shape"):
            assert "what was loaded could not be read by the first step" in found[key][1]
        assert found["then"]


@pytest.mark.parametrize("form", ["partial", "full", "portable"])
def test_a_group_may_be_added_between_resuming_and_the_first_step(tmp_path: Path, form: str) -> None:
    assert run("added_group", tmp_path, form=form) == [True, True]


def test_a_parameter_that_is_none_of_the_models_has_its_state(tmp_path: Path) -> None:
    assert run("strange_parameter", tmp_path) == [True, True]


def test_files_of_other_programs_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    for found in run("files_of_hosts", tmp_path):
        assert "the ranks found different saves of 'other'" in found["other"]
        assert found["copy"] == ""


def test_entries_of_all_stages_are_looked_at_on_all_ranks(tmp_path: Path) -> None:
    """By modules' own hooks too, and after torch has copied its own."""
    assert run("entries_of_all_stages", tmp_path) == [[], []]


@pytest.mark.ci
def test_what_was_loaded_stays_whatever_hooks_after_partition_do(tmp_path: Path) -> None:
    for found in run("hooks_after_partition", tmp_path):
        assert found["present names"] and found["older names"] and found["nothing was loaded"]
        first, second = found["fails"]
        assert "of the script" in first
        assert "what was loaded could not be read by the first step (ValueError: of the script)" in second
