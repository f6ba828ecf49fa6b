"""Names of a rank's own files: those of SMP up to 1.5, and those since 1.6."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.harness import run_distributed

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


def test_files_of_another_name_are_not_taken_for_it(tmp_path: Path) -> None:
    """``model_0_0`` is what jobs of newer parameters call ``model``, and those of older ones ``model_0``."""
    smp.init_in_memory({**OLD, "fp16": False})
    smp.save("epoch 0", tmp_path / "model_0")
    with pytest.raises(FileNotFoundError, match=r"_0_0_0' is there, .* '_0_0' appended, so it is not"):
        smp.load(tmp_path / "model")
    smp.save("model", tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == ["model_0_0", "model_0_0_0"]
    assert smp.load(tmp_path / "model_0") == "epoch 0"  # though the other file is newer
    smp.save("epoch 0 again", tmp_path / "model_0")
    assert smp.load(tmp_path / "model") == "model"
    os.remove(tmp_path / "model_0_0_0")
    with pytest.raises(FileNotFoundError, match="model_0_0' is there"):
        smp.load(tmp_path / "model_0")


def test_a_full_file_is_no_part_of_another(tmp_path: Path) -> None:
    smp.init_in_memory({**OLD, "fp16": False})
    smp.save("epoch 0, whole", tmp_path / "model_0", partial=False)
    with pytest.raises(FileNotFoundError, match="model_0' is there, but it was saved whole"):
        smp.load(tmp_path / "model")
    assert smp.load(tmp_path / "model_0", partial=False) == "epoch 0, whole"


def test_a_full_checkpoint_that_a_script_has_put_together_itself(tmp_path: Path) -> None:
    smp.init_in_memory(OLD)
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    weights = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    smp.save(weights, tmp_path / "t", partial=False)
    smp.resume_from_checkpoint(tmp_path, tag="t", partial=False)
    assert all((value == 3.0).all() for value in model.state_dict().values())


def test_a_copy_under_another_name_is_read(tmp_path: Path) -> None:
    smp.init_in_memory({**OLD, "fp16": False})
    smp.save("the best", tmp_path / "epoch 3")
    shutil.copy(tmp_path / "epoch 3_0_0", tmp_path / "best_0_0")
    assert smp.load(tmp_path / "best") == "the best"


def test_a_file_without_a_note_is_read(tmp_path: Path) -> None:
    """Of SMP itself, or of an earlier version of this library."""
    torch.save("theirs", tmp_path / "model_0")
    smp.init_in_memory({**OLD, "fp16": False})
    assert smp.load(tmp_path / "model") == "theirs"


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
