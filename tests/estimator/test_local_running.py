"""A local job while it runs: described, watched, stopped, and ended with its Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sagemaker.exceptions import UnexpectedStatusException

from tests.estimator.jobs import estimator, files_in, process_ids, processes_of
from tests.launch.launching import hear_signals

pytestmark = pytest.mark.sampled(3)

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


@pytest.mark.ci
def test_a_job_is_described_watched_and_stopped_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = estimator(tmp_path, SAVE_WHEN_TOLD)
    job.fit(wait=False)
    running = job.latest_training_job
    assert running.describe()["TrainingJobStatus"] == "InProgress"
    assert job.model_data.endswith(f"/jobs/{running.name}/output/model.tar.gz")

    def both_are_up() -> bool:
        job.sagemaker_session.logs_for_job(running.name)
        shown = capsys.readouterr().out
        return "[0] up\n" in shown and "[1] up\n" in shown

    wait_until(both_are_up, "both ranks print")
    running.stop()
    seen = []

    def has_ended() -> bool:
        seen.append(running.describe()["TrainingJobStatus"])
        return seen[-1] == "Stopped"

    wait_until(has_ended, "the job stops")
    running.wait(logs=False)
    assert set(seen) == {"Stopping", "Stopped"}
    description = running.describe()
    assert (description["TrainingJobStatus"], description["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert files_in(job.model_data) == {"saved-0": "in time", "saved-1": "in time"}
    statuses = [item["Status"] for item in description["SecondaryStatusTransitions"]]
    assert statuses == ["Starting", "Downloading", "Training", "Stopping", "Uploading", "Stopped"]
    assert processes_of(tmp_path) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_host_that_dies_is_noticed_while_the_first_one_waits(tmp_path: Path) -> None:
    job = estimator(tmp_path, "", instance_count=2)
    # The second host does not come to say that it is there: it is busy installing.
    (tmp_path / "source" / "requirements.txt").write_text("./slow\n")
    (tmp_path / "source" / "slow").mkdir()
    (tmp_path / "source" / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "source" / "slow" / "backend.py").write_text("import time\ntime.sleep(600)\n")
    job.fit(wait=False)
    hosts: list[int] = []

    def second_is_up() -> bool:
        hosts[:] = process_ids("smp_lite.entrypoints.train", f"{tmp_path}", "/algo-2 ")
        return bool(hosts)

    wait_until(second_is_up, "the second host starts")
    os.kill(hosts[0], signal.SIGKILL)
    with pytest.raises(
        UnexpectedStatusException, match="host algo-2 failed first: killed by SIGKILL"
    ) as caught:
        job.sagemaker_session.logs_for_job(job.latest_training_job.name, wait="None", timeout=LIMIT_S)
    assert "exit code: 137" in str(caught.value)
    wait_until(lambda: not processes_of(tmp_path), "all processes of the job are gone")


INTERRUPTED = """
import sys
from pathlib import Path
from tests.estimator.jobs import estimator
job = estimator(
    Path(sys.argv[1]), "model('started', '')\\ntime.sleep(600)", environment={"SMP_LITE_GRACE_S": "0.5"}
)
try:
    job.fit(job_name="left")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_an_interrupted_fit_stops_the_job_and_raises(tmp_path: Path) -> None:
    started = tmp_path / "jobs" / "left" / "hosts" / "algo-1" / "model" / "started"
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    ) as program:
        try:
            wait_until(started.exists, "the script starts")
            program.send_signal(signal.SIGINT)
            output, _ = program.communicate(timeout=LIMIT_S)
        finally:
            program.kill()
    assert "UnexpectedStatusException Training job left was interrupted (KeyboardInterrupt)" in output
    wait_until(lambda: not processes_of(tmp_path), "all processes of the job are gone")


PROGRAM = """
import sys
from pathlib import Path
from tests.estimator.jobs import estimator
job = estimator(Path(sys.argv[1]), "model('started', '')\\ntime.sleep(600)")
job.fit(wait=False, job_name="left")
"""


@pytest.mark.slow
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
    else:  # a child that was forked is another Python
        wait += "import os\nfrom tests.estimator.jobs import processes_of\n"
        wait += "if os.fork() == 0:\n    sys.exit()\nos.wait()\n"
        wait += "print(len(processes_of(Path(sys.argv[1]))), 'left')\n"
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
        assert result.stderr.count("job left is stopped") == 1
        assert re.search("^[1-9][0-9]* left$", result.stdout, re.MULTILINE), result.stdout
    wait_until(lambda: not processes_of(tmp_path), "all processes of the job are gone")
