"""Names of a rank's own files: those of SMP up to 1.5, and those since 1.6."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smp_lite as smp
from tests.harness import run_distributed


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    smp.reset()
    yield
    smp.reset()


OLD: dict[str, Any] = {"partitions": 1, "trace_device": "cpu", "overlapping_allreduce": True}
NEW = [
    {"tensor_parallel_degree": 1},
    {"shard_optimizer_state": False},
    {"prescaled_batch": True},
    {"fp16": False},
]


def test_a_job_of_old_parameters_has_one_number(tmp_path: Path) -> None:
    smp.init_in_memory(OLD)
    smp.save({"a": 1}, tmp_path / "model.pt", partial=True)
    assert os.listdir(tmp_path) == ["model.pt_0"]
    assert smp.load(tmp_path / "model.pt") == {"a": 1}


@pytest.mark.parametrize("key", NEW)
def test_a_job_of_newer_ones_has_two(tmp_path: Path, key: dict[str, Any]) -> None:
    smp.init_in_memory({**OLD, **key})
    smp.save({"a": 1}, tmp_path / "model.pt", partial=True)
    assert os.listdir(tmp_path) == ["model.pt_0_0"]
    assert smp.load(tmp_path / "model.pt") == {"a": 1}


def test_each_reads_what_the_other_wrote_the_newer_first(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    smp.init_in_memory(OLD)
    smp.save("old", file)
    smp.reset()
    smp.init_in_memory({**OLD, "tensor_parallel_degree": 1})
    assert smp.load(file) == "old"
    smp.save("new", file)
    assert smp.load(file) == "new"
    assert smp.load(file, back_compat=True) == "old"
    os.remove(f"{file}_0")
    assert smp.load(file, back_compat=True) == "new"
    smp.reset()
    smp.init_in_memory(OLD)
    assert smp.load(file) == "new"
    smp.save("newest", file)
    smp.reset()
    smp.init_in_memory({**OLD, "tensor_parallel_degree": 1})
    assert smp.load(file) == "newest"


def test_each_replicas_own_has_three(tmp_path: Path) -> None:
    smp.init_in_memory(OLD)
    smp.save("own", tmp_path / "optimizer.pt", v3=True)
    assert os.listdir(tmp_path) == ["optimizer.pt_0_0_0"]
    assert smp.load(tmp_path / "optimizer.pt") == "own"


def test_an_error_names_the_file_that_would_be_written(tmp_path: Path) -> None:
    smp.init_in_memory({**OLD, "fp16": False})
    with pytest.raises(FileNotFoundError, match=r"model.pt_0_0' does not exist \(was it saved\?\)"):
        smp.load(tmp_path / "model.pt")


def save_on_ranks(folder: str) -> tuple[list[str], Any]:
    """On every rank: what is in the folder after all have saved, and what this one reads."""
    smp.init()
    if smp.dp_rank() == 0:
        smp.save(smp.rank(), os.path.join(folder, "a"))
    smp.save(smp.rank(), os.path.join(folder, "b"), v3=True)
    smp.barrier()
    return sorted(os.listdir(folder)), smp.load(os.path.join(folder, "a"))


def test_numbers_are_those_of_the_ranks(tmp_path: Path) -> None:
    parameters = {"partitions": 2, "ddp": True, "tensor_parallel_degree": 1}
    function = f"{__name__}:save_on_ranks"
    found = run_distributed(function, 4, kwargs={"folder": str(tmp_path)}, parameters=parameters)
    for rank, (files, own) in enumerate(found):
        assert files == ["a_0_0", "a_1_0", "b_0_0_0", "b_0_0_1", "b_1_0_0", "b_1_0_1"]
        assert own == rank % 2
