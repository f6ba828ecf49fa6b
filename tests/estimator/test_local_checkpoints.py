"""Checkpoints of local jobs in a folder outside the job's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sagemaker.exceptions import UnexpectedStatusException
from sagemaker.pytorch import PyTorch

from tests.estimator.jobs import estimator

SAVE = """
if rank == 0:
    open(os.path.join(os.environ["CHECKPOINTS"], "step-1"), "w").close()
"""


def saving(tmp_path: Path, local: Path, uri: str) -> PyTorch:
    return estimator(
        tmp_path,
        SAVE,
        checkpoint_s3_uri=uri,
        checkpoint_local_path=str(local),
        environment={"CHECKPOINTS": str(local)},
    )


@pytest.mark.ci
def test_one_folder_serves_jobs_with_different_checkpoints(tmp_path: Path) -> None:
    local = tmp_path / "checkpoints"
    for number in (1, 2):
        saving(tmp_path, local, f"s3://smp-lite-local/checkpoints-{number}").fit(logs="None")
        assert not local.is_symlink()
        assert os.listdir(tmp_path / "jobs" / f"checkpoints-{number}") == ["step-1"]


@pytest.mark.slow
def test_a_link_to_nowhere_is_replaced_and_a_link_of_the_user_stays(tmp_path: Path) -> None:
    local = tmp_path / "checkpoints"
    local.symlink_to(tmp_path / "gone")
    saving(tmp_path, local, "s3://smp-lite-local/kept").fit(logs="None")
    kept = tmp_path / "jobs" / "kept"
    assert os.listdir(kept) == ["step-1"]
    local.symlink_to(kept)
    with pytest.raises(UnexpectedStatusException, match="exists already: remove it if no job uses it"):
        saving(tmp_path, local, "s3://smp-lite-local/others").fit(logs="None")
    assert local.readlink() == kept
