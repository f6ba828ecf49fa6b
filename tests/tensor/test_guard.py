"""The guard on pieces of sharded parameters: after errors, and where memory is read by its address."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_distributed

CASES = "tests.tensor.guard_cases"


def test_it_is_closed_after_errors() -> None:
    for norms, opened in run_distributed(f"{CASES}:after_errors", 2):
        assert all("norm of a sharded parameter" in text for text in norms), norms
        assert opened == [0, 0, 0]


def test_a_copy_is_not_written_as_if_it_were_whole(tmp_path: Path) -> None:
    for said, right in run_distributed(f"{CASES}:written", 2, kwargs={"folder": str(tmp_path)}):
        assert "of a sharded parameter would be saved, and pass for the whole" in said
        assert right == str([True, True, True])


def test_it_is_closed_after_an_inner_step_that_fails() -> None:
    for norm, saved in run_distributed(f"{CASES}:after_an_inner_step", 2):
        assert "norm of a sharded parameter" in norm
        assert "of a sharded parameter would be saved, and pass for the whole" in saved
