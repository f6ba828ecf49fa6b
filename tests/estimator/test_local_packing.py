"""The source of a local job is packed without the jobs before it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from smp_lite.estimator.local.session import LocalMPISession
from smp_lite.estimator.request.dry_run import request_of
from tests.estimator.jobs import estimator


def packed(job_directory: Path) -> set[str]:
    with tarfile.open(job_directory / "source" / "sourcedir.tar.gz") as archive:
        return {os.path.normpath(member.name) for member in archive.getmembers() if member.isfile()}


def an_earlier_job(jobs: Path, data: Path) -> None:
    """What a job with a channel leaves."""
    channels = jobs / "earlier" / "hosts" / "algo-1" / "input" / "data"
    channels.mkdir(parents=True)
    (channels / "train").symlink_to(data, target_is_directory=True)


def test_jobs_in_the_working_directory_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / "package" / "__init__.py").touch()
    (source / "linked.txt").symlink_to(source / "package" / "__init__.py")
    monkeypatch.chdir(source)
    # The channel is the source itself: followed, its links would never end.
    an_earlier_job(source / "smp_lite_jobs", source)
    job = estimator(tmp_path, "", source_dir=".", sagemaker_session=LocalMPISession())
    job.prepare_workflow_for_training("packed")
    files = packed(source / "smp_lite_jobs" / "packed")
    assert files == {"train.py", "package/__init__.py", "linked.txt"}
    assert job.source_dir == "."


def test_jobs_deep_in_the_source_and_in_a_dependency_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    jobs = source / "runs" / "jobs"
    an_earlier_job(jobs, tmp_path)
    (source / "runs" / "notes.txt").touch()
    job = estimator(
        tmp_path, "", sagemaker_session=LocalMPISession(jobs), dependencies=[str(source / "runs")]
    )
    job.prepare_workflow_for_training("packed")
    assert packed(jobs / "packed") == {"train.py", "runs/notes.txt"}
    assert job.dependencies == [str(source / "runs")]


@pytest.mark.slow
def test_a_dry_run_leaves_them_out_too(tmp_path: Path) -> None:
    jobs = tmp_path / "source" / "jobs"
    an_earlier_job(jobs, tmp_path / "nowhere")  # which packing could not follow
    job = estimator(tmp_path, "", sagemaker_session=LocalMPISession(jobs))
    assert request_of(job, job_name="asked")["TrainingJobName"] == "asked"


def test_jobs_that_lie_among_the_source_are_refused(tmp_path: Path) -> None:
    job = estimator(tmp_path, "", sagemaker_session=LocalMPISession(tmp_path / "source"))
    with pytest.raises(ValueError, match=r"source_dir=.* is also the folder of LocalMPISession"):
        job.prepare_workflow_for_training("refused")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [".", "./"])
def test_a_dependency_without_a_name_keeps_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "helper.py").touch()
    monkeypatch.chdir(folder)
    session = LocalMPISession()
    for number in range(2):  # the folder of jobs is there the second time
        job = estimator(tmp_path, "", sagemaker_session=session, dependencies=[name])
        job.prepare_workflow_for_training(f"packed-{number}")
        assert packed(folder / "smp_lite_jobs" / f"packed-{number}") == {"train.py", "helper.py"}


def test_a_folder_of_jobs_that_lies_elsewhere_is_not_followed(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    source.mkdir()
    an_earlier_job(elsewhere, tmp_path)
    (source / "jobs").symlink_to(elsewhere, target_is_directory=True)
    job = estimator(tmp_path, "", sagemaker_session=LocalMPISession(source / "jobs"))
    job.prepare_workflow_for_training("packed")
    assert packed(elsewhere / "packed") == {"train.py"}
