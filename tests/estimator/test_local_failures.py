"""What goes wrong in a local job has a name, loses no output, and leaves no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ParamValidationError
from sagemaker.exceptions import UnexpectedStatusException
from sagemaker.pytorch import PyTorch

from tests.estimator.jobs import distribution, estimator, files_in, outputs_of, processes_of, write_wheel

pytestmark = pytest.mark.sampled(3)

KEEP = """
if rank == 0:
    model("weights.txt", "up to here")
    output("notes.txt", "so far")
world.Barrier()
"""


def failure_of(job: PyTorch, directory: Path, inputs: Any = None) -> str:
    """The SDK's own exception as text; checks the end state."""
    with pytest.raises(UnexpectedStatusException) as caught:
        job.fit(inputs, logs="None")
    assert processes_of(directory) == []
    return str(caught.value)


@pytest.mark.slow
def test_an_exception_comes_with_its_traceback(tmp_path: Path) -> None:
    job = estimator(tmp_path, KEEP + "if rank == 1: raise RuntimeError('the cause')\ntime.sleep(60)")
    text = failure_of(job, tmp_path)
    assert "Failed. Reason: AlgorithmError: rank 1 failed first: RuntimeError: the cause" in text
    assert "in <module>" in text
    assert files_in(job.model_data) == {"weights.txt": "up to here"}
    assert outputs_of(job) == {"notes.txt": "so far"}
    description = job.latest_training_job.describe()
    assert (description["TrainingJobStatus"], description["SecondaryStatus"]) == ("Failed", "Failed")


@pytest.mark.thorough
def test_an_exit_code_is_told_with_the_last_lines(tmp_path: Path) -> None:
    job = estimator(tmp_path, KEEP + "say('words before', rank)\nif rank == 1: sys.exit(7)\ntime.sleep(60)")
    text = failure_of(job, tmp_path)
    assert "rank 1 failed first: sys.exit(7)" in text
    assert "exit code: 7" in text
    assert "rank 1 printed last:\nwords before 1" in text
    assert files_in(job.model_data) == {"weights.txt": "up to here"}


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        KEEP + "say('last words')\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
    )
    text = failure_of(job, tmp_path)
    assert "rank 1 failed first: killed by signal 9 (SIGKILL)" in text
    assert "exit code: 137" in text
    assert "last words" in text


@pytest.mark.slow
def test_a_host_that_cannot_say_why_it_failed_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every Python that starts from here on ends before it gets to the job.
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('words before', flush=True)\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = failure_of(estimator(tmp_path, ""), tmp_path)
    assert "host algo-1 left no failure file; it printed last:\nwords before\nexit code: 9" in text


@pytest.mark.thorough
def test_binary_output_does_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = estimator(
        tmp_path,
        "os.write(1, bytes(range(256)) + b'\\n')\nworld.Barrier()\nif rank == 0: sys.exit(3)",
    )
    with pytest.raises(UnexpectedStatusException, match="exit code: 3"):
        job.fit()
    assert "\ufffd" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_over_its_time_is_ended_and_keeps_its_outputs(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        KEEP + "time.sleep(600)",
        max_run=3,
        environment={"SMP_LITE_GRACE_S": "0.5"},
    )
    text = failure_of(job, tmp_path)
    assert "Stopped. Reason: MaxRuntimeExceeded: the job ran for over 3 s" in text
    assert files_in(job.model_data) == {"weights.txt": "up to here"}
    assert job.latest_training_job.describe()["SecondaryStatus"] == "MaxRuntimeExceeded"


@pytest.mark.slow
def test_a_host_that_never_comes_is_named(tmp_path: Path) -> None:
    job = estimator(tmp_path, "", instance_count=2, environment={"SMP_LITE_HOST_LIMIT_S": "3"})
    # Installing what the script requires takes for ever, but on the second host only.
    (tmp_path / "source" / "requirements.txt").write_text("./slow\n")
    slow = tmp_path / "source" / "slow"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    wheel = write_wheel(tmp_path, "slow", "")
    (slow / "backend.py").write_text(
        f"""\
import os, shutil, time
if "/algo-2/" in os.getcwd():
    time.sleep(600)
def build_wheel(directory, config_settings=None, metadata_directory=None):
    return os.path.basename(shutil.copy({str(wheel)!r}, directory))
"""
    )
    text = failure_of(job, tmp_path)
    assert "AlgorithmError: host(s) algo-2 did not come within 3 s" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"NUMBER": 1}}, "Invalid type for parameter Environment.NUMBER, value: 1"),
        ({"max_run": None}, "Invalid type for parameter StoppingCondition.MaxRuntimeInSeconds, value: None"),
    ],
)
def test_a_request_is_refused_as_by_the_client_of_the_service(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamValidationError, match=message):
        estimator(tmp_path, "", **changes).fit({"train": "file:///no/such/folder"}, logs="None")


def test_an_output_path_that_is_no_address_is_refused_at_once(tmp_path: Path) -> None:
    job = estimator(tmp_path, "", code_location="s3://smp-lite-local/code", output_path="s3:/bucket")
    with pytest.raises(ValueError, match=r"output_path: 's3:/bucket/.* must start with s3://bucket"):
        job.fit(logs="None")


@pytest.mark.slow
def test_the_input_mode_of_the_job_counts_for_its_channels(tmp_path: Path) -> None:
    text = failure_of(estimator(tmp_path, "", input_mode="Pipe"), tmp_path, {"train": tmp_path.as_uri()})
    assert "channel 'train': input mode 'Pipe' is not supported in local mode: use 'File'" in text


@pytest.mark.slow
def test_outputs_are_kept_when_the_script_removes_a_folder_for_them(tmp_path: Path) -> None:
    script = """
import shutil
if rank == 0:
    model("weights", "")
    shutil.rmtree(os.environ["SM_OUTPUT_DATA_DIR"])
"""
    job = estimator(tmp_path, script)
    job.fit(logs="None")
    assert files_in(job.model_data) == {"weights": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"train": "file:///no/such/folder"}, "channel 'train': file:///no/such/folder is neither"),
        ({"train": "s3://smp-lite-local/nothing"}, "channel 'train': s3://smp-lite-local/nothing is neither"),
    ],
)
def test_a_channel_that_is_not_there_is_named(tmp_path: Path, inputs: Any, message: str) -> None:
    text = failure_of(estimator(tmp_path, ""), tmp_path, inputs)
    assert f"ClientError: {message}" in text


@pytest.mark.slow
def test_a_source_that_is_no_archive_is_named(tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    archive = tmp_path / "jobs" / "code.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"not an archive")
    job.source_dir = "s3://smp-lite-local/code.tar.gz"
    text = failure_of(job, tmp_path)
    assert "code.tar.gz' could not be unpacked as a tar.gz archive" in text


@pytest.mark.slow
def test_a_requirement_that_does_not_exist_is_named(tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    (tmp_path / "source" / "requirements.txt").write_text("./no-such-package\n")
    text = failure_of(job, tmp_path)
    assert "requirements.txt could not be installed" in text
    assert "no-such-package" in text


@pytest.mark.slow
def test_model_parallelism_without_mpi_is_refused_by_the_host(tmp_path: Path) -> None:
    # The SDK lets it through and the job would be one process.
    options = distribution()
    options["mpi"]["enabled"] = False
    text = failure_of(estimator(tmp_path, "", distribution=options), tmp_path)
    assert "mp_parameters are given, but sagemaker_mpi_enabled is not true" in text


@pytest.mark.slow
def test_parameters_that_do_not_fit_the_processes_are_refused_by_the_host(tmp_path: Path) -> None:
    text = failure_of(estimator(tmp_path, "", distribution=distribution(processes=3)), tmp_path)
    assert "3" in text
    assert "partitions" in text
