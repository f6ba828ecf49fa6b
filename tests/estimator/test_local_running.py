"""A local job while it runs: described, watched, stopped, and ended with its Python."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.estimator.jobs import estimator, files_in, processes_of

LIMIT_S = 40.0

SAVE_WHEN_TOLD = """
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
say("up")
while not told:
    time.sleep(0.05)
model(f"saved-{rank}", "in time")
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s"
        time.sleep(0.05)


def test_a_job_is_described_watched_and_stopped_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = estimator(tmp_path, SAVE_WHEN_TOLD)
    job.fit(wait=False)
    running = job.latest_training_job
    assert running.describe()["TrainingJobStatus"] == "InProgress"

    def both_are_up() -> bool:
        job.sagemaker_session.logs_for_job(running.name)
        shown = capsys.readouterr().out
        return "[0] up\n" in shown and "[1] up\n" in shown

    wait_until(both_are_up, "both ranks print")
    running.stop()
    assert running.describe()["TrainingJobStatus"] == "Stopping"
    running.wait(logs=False)
    description = running.describe()
    assert (description["TrainingJobStatus"], description["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert files_in(job.model_data) == {"saved-0": "in time", "saved-1": "in time"}
    statuses = [item["Status"] for item in description["SecondaryStatusTransitions"]]
    assert statuses == ["Starting", "Downloading", "Training", "Stopping", "Uploading", "Stopped"]
    assert processes_of(tmp_path) == []


def test_a_script_that_ignores_the_notice_is_ended_after_its_grace(tmp_path: Path) -> None:
    job = estimator(
        tmp_path, "model('started', '')\ntime.sleep(600)", environment={"SMP_LITE_GRACE_S": "0.5"}
    )
    job.fit(wait=False)
    started = tmp_path / "jobs" / job.latest_training_job.name / "hosts" / "algo-1" / "model" / "started"
    wait_until(started.exists, "the script starts")
    job.latest_training_job.stop()
    job.latest_training_job.wait(logs=False)
    assert job.latest_training_job.describe()["TrainingJobStatus"] == "Stopped"
    assert processes_of(tmp_path) == []


PROGRAM = """
import sys
from pathlib import Path
from tests.estimator.jobs import estimator
job = estimator(Path(sys.argv[1]), "model('started', '')\\ntime.sleep(600)")
job.fit(wait=False, job_name="left")
"""


@pytest.mark.parametrize("how", ["returns", "is killed"])
def test_a_job_ends_with_the_python_that_started_it(tmp_path: Path, how: str) -> None:
    started = tmp_path / "jobs" / "left" / "hosts" / "algo-1" / "model" / "started"
    wait = textwrap.dedent(
        f"""
        import time
        while not Path({str(started)!r}).exists():
            time.sleep(0.05)
        """
    )
    if how == "is killed":
        wait += "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + wait, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if how == "returns":
        assert result.returncode == 0, result.stderr
        assert "job left is stopped: a local job ends with the Python that started it" in result.stderr
    wait_until(lambda: not processes_of(tmp_path), "all processes of the job are gone")
