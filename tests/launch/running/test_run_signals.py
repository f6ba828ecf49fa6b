"""Whatever ends the launcher ends its ranks, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launching import (
    HANG_S,
    command,
    hear_signals,
    ignore_signals,
    left_behind,
    processes_mentioning,
    write,
)

SLEEP = "import time\nfrom mpi4py import MPI\nprint('up', flush=True)\ntime.sleep(600)\n"


def start(script: Path, num_ranks: int, signals: Callable[[], None] = hear_signals) -> subprocess.Popen[str]:
    """A launch of which all ranks have come up."""
    process = subprocess.Popen(
        command("--processes", str(num_ranks), str(script)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=signals,
    )
    assert process.stdout is not None
    lines = {process.stdout.readline() for _ in range(num_ranks)}
    assert lines == {f"[{rank}] up\n" for rank in range(num_ranks)}
    return process


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_stops_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    script = write(tmp_path, "script.py", SLEEP)
    with start(script, 3) as process:
        process.send_signal(number)
        assert process.wait(HANG_S) == code
        assert left_behind(script) == []


@pytest.mark.ci
def test_what_the_launcher_was_started_to_ignore_it_ignores_and_sigterm_stops_everything(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, "script.py", SLEEP)
    with start(script, 2, ignore_signals) as process:
        for number in (signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.5)  # in which it would end
        assert process.poll() is None
        assert len(processes_mentioning(script)) > 2
        process.terminate()
        assert process.wait(HANG_S) == 143
        assert left_behind(script) == []


def test_ranks_that_ignore_the_signal_are_killed(tmp_path: Path) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script = write(tmp_path, "script.py", ignore + SLEEP)
    with start(script, 2) as process:
        process.terminate()
        assert process.wait(HANG_S) == 143
        assert left_behind(script) == []


def test_ranks_do_not_outlive_an_mpirun_that_was_killed(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", SLEEP)
    with start(script, 2) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGKILL)
        assert process.wait(HANG_S) == 137
        assert left_behind(script) == []
        assert process.stderr is not None
        assert process.stderr.read() == "mpirun ended with exit code 137\n"


def test_a_reader_that_goes_away_ends_the_launch(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import time\nwhile True:\n    print('up')\n    time.sleep(0.05)\n")
    process = subprocess.Popen(
        command("--processes", "1", str(script)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(HANG_S) == 141
        assert left_behind(script) == []
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", SLEEP)
    with start(script, 2) as process:
        process.kill()
        process.wait(HANG_S)
    deadline = time.monotonic() + HANG_S
    while processes_mentioning(script):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launch_outlives_its_terminal_where_that_is_wanted(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import pathlib, time\npathlib.Path('up').touch()\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.05)\nprint('done')\n",
    )
    with subprocess.Popen(
        command("--processes", "1", str(script)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_signals,
    ) as process:
        try:
            deadline = time.monotonic() + HANG_S
            while not (tmp_path / "up").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)  # in which it would end
            (tmp_path / "go").touch()
            output, _ = process.communicate(timeout=HANG_S)
        finally:
            process.terminate()
    assert (process.returncode, output) == (0, "[0] done\n")
