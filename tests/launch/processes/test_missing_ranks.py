"""A rank that does not come to smp.init, or not to its end, is waited for within a limit and named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launch.launching import launch, launch_plainly, left_behind, write

pytestmark = [pytest.mark.timeout(600), pytest.mark.sampled(3)]

START = "import signal, time, smp_lite as smp\n"
INIT = "smp.init({'partitions': 2})\n"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
LIMIT = "smp.set_watchdog(3)\n"
ENDS = "import atexit\nif rank == 1: atexit.register(os.kill, os.getpid(), signal.SIGSTOP)\n"

# what rank 1 does, the script, what is said of it
MISSING = {
    "has ended": (f"if rank == 1: sys.exit(0)\n{INIT}", r"1 (has ended) of 2 did not come to smp.init"),
    "is late": (f"if rank == 1: time.sleep(900)\n{INIT}", "1 (runs, process "),
    "is stopped": (f"if rank == 1: {STOPS}\n{INIT}", "1 (is stopped, process "),
    "has MPI, and does not come": (
        f"from mpi4py import MPI\nif rank == 1: time.sleep(900)\n{INIT}",
        "1 (runs, process ",
    ),
    "is stopped at the end": (INIT + LIMIT + ENDS, "MPI waits for rank(s) 1 (is stopped, process "),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", MISSING)
def test_a_rank_that_is_waited_for_has_a_limit(case: str, tmp_path: Path) -> None:
    text, words = MISSING[case]
    script = write(tmp_path, "script.py", START + text)
    limit = {"SMP_LITE_WATCHDOG_S": "3"} if LIMIT not in text else {}
    result = launch(tmp_path, "--processes", "2", str(script), env=limit)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "SMPTimeout: waited 3 s: " in last
    assert words in last
    assert "SMP_LITE_WATCHDOG_S" in last
    assert left_behind(script) == []


@pytest.mark.slow
def test_it_is_the_same_under_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_LITE_WATCHDOG_S", "3")
    script = write(tmp_path, "script.py", START + MISSING["has ended"][0])
    result = launch_plainly(tmp_path, str(script))
    assert result.returncode != 0
    assert "rank 0 failed:" in result.stderr
    assert MISSING["has ended"][1] in result.stderr
    assert left_behind(script) == []


@pytest.mark.slow
def test_a_rank_may_take_its_time_after_the_others(tmp_path: Path) -> None:
    script = write(
        tmp_path, "script.py", START + INIT + LIMIT + "if rank == 1:\n    time.sleep(8)\nprint('end')\n"
    )
    began = time.monotonic()
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == 0, result.stderr
    assert "[1] end" in result.stdout
    assert "rank 0 has ended its script, and MPI waits for rank(s) 1 (runs, process " in result.stderr
    assert time.monotonic() - began > 8
