"""One rank fails: all stop, its exit code is the launcher's, its reason the last thing shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smp_lite.entrypoints.mpi.launch_plan import LaunchPlan
from smp_lite.entrypoints.this_machine.launcher import run_local
from tests.launch.launching import launch, left_behind, write

pytestmark = pytest.mark.sampled(3)

OTHERS_WAIT_IN_MPI = "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
"""What ranks do that have not failed: without the launcher they would wait for ever."""


def test_an_exception_stops_all_and_its_traceback_comes_last(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "print('up', flush=True)\nif rank == 2:\n    raise RuntimeError('the cause')\n" + OTHERS_WAIT_IN_MPI,
    )
    result = launch(tmp_path, "--processes", "3", str(script))
    assert result.returncode == 1
    assert result.stderr.endswith(
        "rank 2 failed first:\nTraceback (most recent call last):\n"
        f'  File "{script}", line 5, in <module>\n'
        "    raise RuntimeError('the cause')\nRuntimeError: the cause\n"
    )
    assert result.stderr.count("the cause'") == 1
    assert sorted(result.stdout.splitlines()) == ["[0] up", "[1] up", "[2] up"]
    assert left_behind(script) == []


def test_the_first_failure_wins_over_the_ones_it_causes(tmp_path: Path) -> None:
    # Rank 0 fails only once it has read that rank 1's record is written, and both fail before
    # either process has ended.
    script = write(
        tmp_path,
        "script.py",
        "import pathlib, time\n"
        "record = pathlib.Path(os.environ['SMP_LITE_ERROR_DIR'], 'rank1.failure.json')\n"
        "if rank == 1:\n"
        "    sys.excepthook = lambda *info: time.sleep(1)\n"
        "    raise ValueError('cause')\n"
        "while not record.exists():\n    time.sleep(0.01)\n"
        "raise OSError('consequence')\n",
    )
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: cause\n")
    assert "[0] OSError: consequence\n" in result.stderr
    assert result.stderr.index("consequence") < result.stderr.index("rank 1 failed first:")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("action", "code", "last_line"),
    [
        ("sys.exit(7)", 7, "sys.exit(7)"),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(3)", 3, "rank 1 failed first: ended with exit code 3 and no Python exception"),
        (
            "os._exit(0)",
            1,
            "rank 1 failed first: ended with exit code 0, but without a word to the other ranks (os._exit?)",
        ),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first: killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "rank 1 failed first: killed by signal 6 (SIGABRT)"),
        ("MPI.COMM_WORLD.Abort(5)", 5, "rank 1 failed first: called MPI_Abort"),
    ],
)
def test_every_way_to_end_gives_its_exit_code(tmp_path: Path, action: str, code: int, last_line: str) -> None:
    script = write(
        tmp_path,
        "script.py",
        f"from mpi4py import MPI\nif rank == 1:\n    {action}\n" + OTHERS_WAIT_IN_MPI,
    )
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == code
    assert result.stderr.splitlines()[-1] == last_line
    assert "prterun" not in result.stderr
    assert left_behind(script) == []


def test_a_mistake_in_the_scripts_syntax_reads_as_in_plain_python(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print(1\n")
    result = launch(tmp_path, "--processes", "1", "script.py")
    assert result.returncode == 1
    assert "rank_main" not in result.stderr
    assert result.stderr.splitlines()[-1] == "SyntaxError: '(' was never closed"


def test_ranks_that_ignore_being_asked_to_stop_are_stopped(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "if rank == 1:\n    raise RuntimeError('the cause')\ntime.sleep(600)\n",
    )
    result = launch(tmp_path, "--processes", "3", str(script))
    assert result.returncode == 1
    assert result.stderr.endswith("RuntimeError: the cause\n")
    assert left_behind(script) == []


@pytest.mark.slow
def test_a_failing_rank_whose_exit_hangs_does_not_hold_the_launch(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import time\nsys.excepthook = lambda *info: time.sleep(600)\n"
        "if rank == 0:\n    raise RuntimeError('the cause')\n" + OTHERS_WAIT_IN_MPI,
    )
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == 1
    assert result.stderr.endswith("RuntimeError: the cause\n")
    assert left_behind(script) == []


def test_a_forked_child_is_not_the_rank(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "child = os.fork()\nif child == 0:\n    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
    )
    result = launch(tmp_path, "--processes", "1", "script.py")
    assert (result.returncode, result.stdout) == (0, "[0] 3\n"), result.stderr


FORKS = """
import smp_lite as smp
smp.init({"partitions": 2, "ddp": False})
for how in ("exit", "raise", "end"):
    child = os.fork()
    if child == 0:
        log = open(f"{how}{rank}", "w")
        log.write(how)
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise ValueError("of a child")
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    smp.barrier()
    print("ended")
"""


@pytest.mark.ci
def test_a_forked_child_of_a_rank_leaves_neither_smp_nor_mpi(tmp_path: Path) -> None:
    write(tmp_path, "script.py", FORKS)
    result = launch(tmp_path, "--processes", "2", "script.py")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        said = [line for line in result.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert said == [f"[{rank}] {text}" for text in ("exit 3", "raise 1", "end 0", "ended")]
        assert [(tmp_path / f"{how}{rank}").read_text() for how in ("exit", "raise", "end")] == [
            "exit",
            "raise",
            "end",
        ]
    assert result.stderr.count("ValueError: of a child") == 2


def test_a_half_made_file_does_not_keep_others_from_being_written(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import gzip\nlog = open('log', 'wb')\nlog.write(b'up to then')\ngzip.open('missing.gz')\n",
    )
    result = launch(tmp_path, "--processes", "1", "script.py")
    assert result.returncode == 1
    assert (tmp_path / "log").read_bytes() == b"up to then"
    assert "_flush_files" not in result.stderr


@pytest.mark.slow
def test_an_mpirun_that_does_not_end_after_a_death_is_ended(tmp_path: Path) -> None:
    # About one of 250 did so where a rank died while another connected; no way is known to make one.
    script = tmp_path / "mpirun"
    script.write_text(
        "trap '' TERM\ncat <<END\n" + "-" * 74 + "\nprterun noticed that process rank 1 with PID 5 on node n "
        "exited\non signal 9 (Killed).\n" + "-" * 74 + "\nEND\nsleep 600 & wait\nsleep 600\n"
    )
    ending = run_local(LaunchPlan(("sh", str(script)), {}, {}), 2, os.environ)
    assert (ending.exit_code, ending.rank) == (128 + 9, 1)
    assert ending.text == "killed by signal 9 (SIGKILL)"
