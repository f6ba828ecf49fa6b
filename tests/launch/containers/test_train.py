"""The container's `train` on `/opt/ml` trees of its own: files, exit codes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import HANG_S, left_behind
from tests.sampling import one_in

pytestmark = pytest.mark.sampled(3)

START = "import os, signal, sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nrank = world.rank\n"


SHOW_ARGUMENTS = "import json; print(json.dumps(sys.argv[1:]))"
ONE_STAGE = {"mp_parameters": {"partitions": 1}}


def make_tree(root: Path, script: str, *, processes: int | None = 2, **changes: Any) -> Path:
    """A job's folder as the service leaves it, with `script` as the code."""
    source = root / "source"
    source.mkdir(parents=True)
    (source / "train.py").write_text(START + script)
    (source / "start.sh").touch()
    config = root / "input" / "config"
    config.mkdir(parents=True)
    values: dict[str, Any] = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": str(source),
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": processes,
        "mp_parameters": {"partitions": 2},
        **changes,
    }
    encoded = {name: json.dumps(value) for name, value in values.items() if value is not None}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    return root


def start_train(root: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "smp_lite.entrypoints.train", "--root", str(root)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(root: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output."""
    with start_train(root, **environment) as process:
        try:
            output, _ = process.communicate(timeout=HANG_S)
        finally:
            process.terminate()
    return process.returncode, output


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_a_job_that_ends_well_leaves_success(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "open(os.environ['SM_MODEL_DIR'] + f'/{rank}', 'w').close()")
    code, output = train(root)
    assert code == 0, output
    assert (root / "output" / "success").exists()
    assert not (root / "output" / "failure").exists()
    assert sorted(os.listdir(root / "model")) == ["0", "1"]


def test_the_seeds_mpi_options_launch(tmp_path: Path) -> None:
    options = "--mca btl_vader_single_copy_mechanism none "
    root = make_tree(tmp_path, "print(world.size)", sagemaker_mpi_custom_mpi_options=options)
    code, output = train(root)
    assert (code, sorted(output.splitlines())) == (0, ["[0] 2", "[1] 2"])


@pytest.mark.ci
def test_a_failure_file_starts_with_the_cause(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        "print('words before', flush=True)\nworld.Barrier()\n"
        "if rank == 1: raise RuntimeError('the cause')\ntime.sleep(60)",
    )
    code, output = train(root)
    assert code == 1
    lines = (root / "output" / "failure").read_text().splitlines()
    assert lines[:3] == [
        "rank 1 failed first: RuntimeError: the cause",
        "",
        "Traceback (most recent call last):",
    ]
    assert lines[-4:] == ["RuntimeError: the cause", "", "rank 1 printed last:", "words before"]
    assert output.splitlines()[-1] == "RuntimeError: the cause"
    assert not (root / "output" / "success").exists()


@pytest.mark.parametrize(
    ("failing", "headline"),
    [
        ("raise ValueError('shapes differ\\n  expected 3\\n  got 4')", "ValueError: shapes differ"),
        ("error = KeyError('x')\nerror.add_note('a hint')\nraise error", "KeyError: 'x'"),
        ("(", "SyntaxError: '(' was never closed (train.py, line 5)"),
    ],
)
def test_the_cause_is_told_in_one_line(failing: str, headline: str, tmp_path: Path) -> None:
    root = make_tree(tmp_path, failing, processes=1, mp_parameters={"partitions": 1})
    assert train(root)[0] == 1
    first_line, _, _ = (root / "output" / "failure").read_text().partition("\n")
    assert first_line == f"rank 0 failed first: {headline}"


def test_a_failure_file_stays_short(tmp_path: Path) -> None:
    script = """
for step in range(40_000):
    sys.stdout.write(f"\\rstep {step} " + "#" * 80)
sys.stdout.flush()
raise ValueError("A" * 1_000_000)
"""
    root = make_tree(tmp_path, script, processes=1, mp_parameters={"partitions": 1})
    assert train(root)[0] == 1
    text = (root / "output" / "failure").read_text()
    assert text.startswith("rank 0 failed first: ValueError: AAAA")
    assert "characters left out" in text
    assert text.endswith("rank 0 printed last:\nstep 39999 " + "#" * 80)
    assert len(text) < 25_000


def test_what_mpirun_itself_complains_of_is_told(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "print('ran')", sagemaker_mpi_custom_mpi_options="--bind-to nonsense")
    code, output = train(root)
    assert code != 0
    assert "ran" not in output.splitlines()
    text = (root / "output" / "failure").read_text()
    assert text.startswith(f"mpirun ended with exit code {code}: ")
    assert "nonsense" in text


def test_files_that_a_failing_rank_has_open_are_written(tmp_path: Path) -> None:
    script = """
log = open(os.environ["SM_MODEL_DIR"] + "/log.txt", "w")
log.write("up to then")
raise ValueError
"""
    root = make_tree(tmp_path, script, processes=1, mp_parameters={"partitions": 1})
    assert train(root)[0] == 1
    assert (root / "model" / "log.txt").read_text() == "up to then"


@pytest.mark.parametrize("ending", one_in(2, ["pass", "sys.exit(7)", "os.kill(os.getpid(), 9)"]))
def test_processes_that_ranks_have_started_end_with_the_job(ending: str, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    script = f"""
import subprocess
for number, session in enumerate([False, True]):
    code = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, {str(sign)!r} + f"{{number}}"], start_new_session=session)
while not all(os.path.exists({str(sign)!r} + number) for number in "01"):
    time.sleep(0.01)
{ending}
"""
    train(make_tree(tmp_path / "root", script, processes=1, mp_parameters={"partitions": 1}))
    assert left_behind(sign) == []


@pytest.mark.parametrize(("value", "expected"), [(None, ["--epochs", "3"]), ("0", ["--epochs", "3"])])
def test_scripts_get_no_parameters_that_strict_parsers_do_not_know(
    value: str | None, expected: list[str], tmp_path: Path
) -> None:
    root = make_tree(tmp_path, SHOW_ARGUMENTS, processes=1, **ONE_STAGE, epochs=3)
    given = {} if value is None else {"SMP_LITE_PASS_PARAMETERS": value}
    code, output = train(root, **given)
    assert (code, json.loads(output.removeprefix("[0] "))) == (0, expected)


def test_scripts_get_the_parameters_where_asked(tmp_path: Path) -> None:
    root = make_tree(tmp_path, SHOW_ARGUMENTS, processes=1, **ONE_STAGE, epochs=3)
    code, output = train(root, SMP_LITE_PASS_PARAMETERS="1")
    assert (code, json.loads(output.removeprefix("[0] "))) == (
        0,
        ["--epochs", "3", "--mp_parameters", "partitions=1"],
    )


def test_a_switch_that_is_none_is_named(tmp_path: Path) -> None:
    code, output = train(make_tree(tmp_path, ""), SMP_LITE_PASS_PARAMETERS="yes")
    assert code == 1
    assert "SMP_LITE_PASS_PARAMETERS='yes': it must be 0 or 1" in output


SECRET = "not for the eyes of strangers, nor for the ranks"


def of_two_hosts(root: Path) -> Path:
    resources = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2.invalid"]}
    (root / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    return root


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a job over 2 hosts needs SMP_LITE_JOB_SECRET"),
        ({"SMP_LITE_JOB_SECRET": ""}, "a job over 2 hosts needs SMP_LITE_JOB_SECRET"),
        (
            {"SMP_LITE_JOB_SECRET": "hunter2"},
            "SMP_LITE_JOB_SECRET is 7 characters long, and needs 32 or more",
        ),
    ],
    ids=["none", "empty", "short"],
)
def test_without_a_secret_there_is_no_job_over_several_hosts(
    given: dict[str, str], message: str, tmp_path: Path
) -> None:
    root = of_two_hosts(make_tree(tmp_path, "print('ran')"))
    code, output = train(root, SMP_LITE_HOST_LIMIT_S="0", **given)
    assert (code, os.listdir(root / "output")) == (1, ["failure"])
    text = (root / "output" / "failure").read_text()
    assert text.startswith(message)
    assert "environment={'SMP_LITE_JOB_SECRET': secrets.token_urlsafe(32)}" in text
    assert "hunter2" not in text + output
    assert not (root / "code").exists(), "refused before anything is fetched"


def test_a_secret_is_told_to_nobody(tmp_path: Path) -> None:
    root = of_two_hosts(make_tree(tmp_path, "print('ran')", processes=1))
    code, output = train(root, SMP_LITE_HOST_LIMIT_S="0", SMP_LITE_JOB_SECRET=SECRET)
    assert (code, "algo-2.invalid did not come within 0 s" in output) == (1, True)
    assert SECRET not in output + (root / "output" / "failure").read_text()


@pytest.mark.slow
def test_ranks_do_not_have_the_secret(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "print('ran', 'SMP_LITE_JOB_SECRET' in os.environ)")
    code, output = train(root, SMP_LITE_JOB_SECRET=SECRET)
    assert (code, sorted(output.splitlines())) == (0, ["[0] ran False", "[1] ran False"])


def test_an_earlier_jobs_outcome_does_not_stay(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "", processes=1, mp_parameters={"partitions": 1})
    (root / "output").mkdir()
    (root / "output" / "failure").write_text("old")
    assert train(root)[0] == 0
    assert sorted(os.listdir(root / "output")) == ["data", "success"]


def test_the_exit_code_is_the_ranks(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "sys.exit(7 if rank == 1 else None)")
    assert train(root)[0] == 7
    assert "sys.exit(7)" in (root / "output" / "failure").read_text()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sagemaker_program": None}, "names no script"),
        ({"sagemaker_program": "other.py"}, "entry point 'other.py' is not in the source code"),
        ({"sagemaker_program": "start.sh"}, "'start.sh' must be a Python file (.py)"),
        ({"sagemaker_submit_directory": "/no/such"}, "'/no/such', but there is no such file or folder"),
        ({"sagemaker_mpi_enabled": False}, "sagemaker_mpi_enabled is not true"),
        ({"sagemaker_torch_distributed_enabled": True}, "asks for a launcher that this entry point"),
        ({"mp_parameters": {"partitons": 2}}, "did you mean 'partitions'"),
        ({"mp_parameters": {"partitions": 3}}, "partitions"),
        ({"sagemaker_mpi_custom_mpi_options": "--hostfile x"}, "--hostfile"),
    ],
)
def test_what_cannot_run_is_named_before_anything_runs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    root = make_tree(tmp_path, "print('ran')", **changes)
    code, output = train(root)
    assert code == 1
    assert "ran" not in output.splitlines()
    assert message in output
    assert "Traceback" not in output
    assert message in (root / "output" / "failure").read_text()


def test_a_folder_that_is_no_job_is_named(tmp_path: Path) -> None:
    code, output = train(tmp_path / "nothing")
    assert code == 1
    assert "there is no job in" in output


def train_and_stop(root: Path) -> tuple[int, str]:
    """Exit code and output of a job that is sent SIGTERM once both ranks have left a sign, `up-0`, `up-1`."""
    with start_train(root) as process:
        wait_for(root / "model" / "up-0")
        wait_for(root / "model" / "up-1")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG_S)
    return process.returncode, output


def test_sigterm_is_a_notice_and_ranks_save_in_time(tmp_path: Path) -> None:
    script = """
import subprocess
helper = subprocess.Popen(["sleep", "600"])
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
open(os.environ["SM_MODEL_DIR"] + f"/up-{rank}", "w").close()
while not told:
    time.sleep(0.05)
time.sleep(0.2)
assert helper.poll() is None, "the notice has killed a program that this rank has started"
helper.kill()
open(os.environ["SM_MODEL_DIR"] + f"/saved-{rank}", "w").close()
"""
    root = make_tree(tmp_path, script)
    code, output = train_and_stop(root)
    assert code == 0, output
    assert sorted(os.listdir(root / "model")) == ["saved-0", "saved-1", "up-0", "up-1"]


@pytest.mark.slow
def test_a_notice_that_comes_before_init_is_not_lost(tmp_path: Path) -> None:
    script = """
import smp_lite as smp
from smp_lite.stop_notice import was_given
open(os.environ["SM_MODEL_DIR"] + f"/up-{rank}", "w").close()
while not was_given():
    time.sleep(0.05)
smp.init()
assert smp.should_stop()
"""
    root = make_tree(tmp_path, script)
    code, output = train_and_stop(root)
    assert code == 0, output


@pytest.mark.parametrize("place", ["while ranks run", "while pip runs"])
def test_sigterm_ends_a_job_that_does_not_listen(place: str, tmp_path: Path) -> None:
    root = make_tree(tmp_path, "open(os.environ['SM_MODEL_DIR'] + '/up', 'w').close()\ntime.sleep(600)")
    sign = root / "model" / "up"
    if place == "while pip runs":
        slow = root / "source" / "slow"
        slow.mkdir()
        (root / "source" / "requirements.txt").write_text("./slow\n")
        sign = root / "pip-runs"
        (slow / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (slow / "backend.py").write_text(f"import time\nopen({str(sign)!r}, 'w').close()\ntime.sleep(600)\n")
    with start_train(root, SMP_LITE_GRACE_S="0.5") as process:
        wait_for(sign)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert (root / "output" / "failure").read_text() == "stopped by SIGTERM"


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_grace_that_is_no_time_is_named(value: str, tmp_path: Path) -> None:
    code, output = train(make_tree(tmp_path, ""), SMP_LITE_GRACE_S=value)
    assert code == 1
    assert f"SMP_LITE_GRACE_S='{value}': it must be a number of seconds, 0 or more" in output
