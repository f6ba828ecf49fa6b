"""Who is said to be missing while MPI begins, by what is known on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from smp_lite.comm.transports import start_watch
from smp_lite.errors_record import ERROR_DIR_VARIABLE

HERE = "on this host (host)"


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 0 of 4 of a job whose other ranks have no processes."""
    variables = {"RANK": "0", "SIZE": "4", "LOCAL_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "none-of-this-machine@1")
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    return monkeypatch


def come(*ranks: int) -> None:
    for rank in ranks:
        start_watch._mark("begins", rank).touch()


def test_the_ranks_that_did_not_come_are_named(mpirun: pytest.MonkeyPatch) -> None:
    come(0, 2)
    said = start_watch._who_did_not_come()
    assert said.replace(" (has ended)", "") == "rank(s) 1, 3 of 4 did not come to smp.init"


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ((0,), f"of the 2 rank(s) {HERE} only 0 came to smp.init"),
        ((0, 1), f"of the 2 rank(s) {HERE} all came to smp.init, so a rank of another host did not, or MPI "),
    ],
)
def test_of_several_hosts_each_speaks_for_itself(
    came: tuple[int, ...], said: str, mpirun: pytest.MonkeyPatch
) -> None:
    mpirun.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    come(*came)
    assert start_watch._who_did_not_come().startswith(said)


def test_ranks_that_are_all_there_are_not_blamed(mpirun: pytest.MonkeyPatch) -> None:
    come(0, 1, 2, 3)
    assert start_watch._who_did_not_come() == "MPI could not connect the ranks, which are all there"


def test_another_launcher_tells_less(mpirun: pytest.MonkeyPatch) -> None:
    mpirun.delenv("PMIX_SERVER_TMPDIR")
    assert "which one, the launcher has not told us" in start_watch._who_did_not_come()


def test_a_rank_that_is_through_has_no_limit_any_more(mpirun: pytest.MonkeyPatch) -> None:
    with start_watch.watched_start(0, 300.0):
        assert start_watch._mark("begins", 0).exists()
    assert not start_watch._mark("begins", 0).exists()


def test_what_the_watch_says_ends_the_rank(tmp_path: Path) -> None:
    """Watched as one whose MPI does not begin, a process is killed, and its job's folder has the error."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import subprocess, sys, time\n"
        f"watch = [sys.executable, '-I', '-S', {start_watch.__file__!r}, 'begins', '0', '0.5']\n"
        "watching = subprocess.Popen(watch, stdin=subprocess.PIPE)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, ERROR_DIR_VARIABLE: str(tmp_path)}
    found = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=50
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    written = "".join(path.read_text(errors="replace") for path in tmp_path.iterdir() if path != script)
    assert "SMPTimeout: waited 0.5 s: another rank did not come to smp.init" in written + found.stderr


def test_a_rank_under_a_debugger_is_not_stopped(mpirun: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, state in enumerate("RTt"):
        folder = tmp_path / "proc" / str(100 + number)
        folder.mkdir(parents=True)
        (folder / "environ").write_text(
            f"PMIX_NAMESPACE=none-of-this-machine@1\0OMPI_COMM_WORLD_RANK={number}\0"
        )
        (folder / "stat").write_text(f"{folder.name} (python) {state} 1 {folder.name} 0")
    mpirun.setattr(start_watch, "_PROCESSES", tmp_path / "proc")
    assert start_watch._processes() == {0: (100, "R"), 1: (101, "T"), 2: (102, "t")}
    assert start_watch._described(start_watch._not_at_the_end(0)) == (
        "1 (is stopped, process 101), 2 (runs, process 102)"
    )
    come(0, 1, 2, 3)
    assert start_watch._who_did_not_come().endswith(", but for 1 (is stopped, process 101)")


@pytest.mark.parametrize(("second", "ends"), [("R", False), ("t", False), ("T", True)])
def test_at_the_end_a_rank_counts_as_stopped_if_it_still_is_a_second_later(
    second: str, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(["R", "T", second])
    waited: list[float] = []
    killed: list[int] = []
    record = types.SimpleNamespace(record_failure=lambda *_, **__: False)

    def is_over(limit_s: float) -> bool:
        waited.append(limit_s)
        return waited == [300.0, 300.0, 1.0, 300.0]

    monkeypatch.setattr(start_watch, "_is_over", is_over)
    monkeypatch.setattr(start_watch, "_not_at_the_end", lambda _: {1: (101, next(states))})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "errors_record", record)
    monkeypatch.setattr(os, "kill", lambda *_: killed.append(1))
    start_watch._main("ends", 0, 300.0)
    assert waited == [300.0, 300.0, 1.0, 0.0 if ends else 300.0]
    assert bool(killed) == ends
    assert ("1 (is stopped, process 101). (The limit" in capsys.readouterr().err) == ends
