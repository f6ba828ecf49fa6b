"""A limit for what MPI waits for by itself, while it begins and while it ends.

MPI_Init and MPI_Finalize come back when all ranks have come to them. Until then nothing of Python runs in
this process, not even another thread, so a second process keeps the time. It ends with the rank, or when the
rank lets go of it. At the limit it says for whom the rank waited, and ends the rank, by which mpirun ends the
job.

Whom it waited for is known of this host: each rank leaves a mark in the folder that mpirun has there for the
job, and the system shows what becomes of its process. While MPI ends, a rank that still runs is not waited
for in vain: it may save for an hour. Only one that has been stopped (SIGSTOP) has a limit then.

The second process runs this file by itself, without the package, so only the standard library is used.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["watch_end", "watched_start"]

_PROCESSES = Path("/proc")
_STEP_S = 0.5
_SECOND_LOOK_S = 1.0
_RANK, _SIZE, _HERE, _JOB, _FOLDER = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_TMPDIR",
)
"""What Open MPI's mpirun tells its ranks. By another launcher it is only known that somebody is missing."""


@contextlib.contextmanager
def watched_start(rank: int, limit_s: float) -> Iterator[None]:
    """Within: the rank begins MPI, for which it has a limit."""
    mark = _leave_mark("begins")
    watch, line = _start("begins", rank, limit_s)
    try:
        yield
    finally:
        os.close(line)
        if watch is not None:
            watch.wait()
        if mark is not None:  # whoever began is through as well
            mark.unlink(missing_ok=True)


def watch_end(rank: int, limit_s: float) -> None:
    """From now on the rank ends MPI, which is the last that it does."""
    _leave_mark("ends")
    watch, _ = _start("ends", rank, limit_s)
    if watch is not None:
        watch.returncode = 0  # nobody waits for it, of which Python would warn


def _start(phase: str, rank: int, limit_s: float) -> tuple[subprocess.Popen[bytes] | None, int]:
    """The second process, and the end of a pipe with which it ends. Python's objects are gone when MPI ends,
    so that is a descriptor."""
    command = [sys.executable, "-I", "-S", __file__, phase, str(rank), repr(limit_s)]
    reading, writing = os.pipe()
    try:
        return subprocess.Popen(command, stdin=reading), writing
    except OSError:  # no more processes: the rank goes on without a limit, as it would in plain MPI
        return None, writing
    finally:
        os.close(reading)


def _leave_mark(phase: str) -> Path | None:
    if any(name not in os.environ for name in (_RANK, _JOB, _FOLDER)):
        return None
    mark = _mark(phase, int(os.environ[_RANK]))
    try:
        mark.touch()
    except OSError:
        return None
    return mark


def _mark(phase: str, rank: int) -> Path:
    return Path(os.environ[_FOLDER], f"smp_lite.{os.environ[_JOB]}.{rank}.{phase}")


# The second process -----------------------------------------------------------------------------------------


def _main(phase: str, rank: int, limit_s: float) -> None:
    parent = os.getppid()
    said = False
    while True:
        if _is_over(limit_s):
            return
        if phase == "begins":
            what = _who_did_not_come()
            break
        waiting = _not_at_the_end(rank)
        if _all_stopped(waiting):  # it may be for a moment
            if _is_over(_SECOND_LOOK_S):
                return
            waiting = _not_at_the_end(rank)
        what = f"rank {rank} has ended its script, and MPI waits for rank(s) {_described(waiting)}"
        if _all_stopped(waiting):
            break
        if waiting and not said:
            said = True
            print(f"smp_lite: {what}", file=sys.stderr, flush=True)
    text = f"waited {limit_s:g} s: {what}"
    text += ". (The limit is set by smp.set_watchdog(seconds) or SMP_LITE_WATCHDOG_S.)"
    if _is_over(0):
        return
    headline = f"smp_lite.errors.SMPTimeout: {text}"
    sys.path.append(str(Path(__file__).parents[2]))
    from errors_record import record_failure  # type: ignore[import-not-found]

    if not record_failure(f"{headline}\n", rank, headline=headline):
        print(f"rank {rank} failed:\n{headline}", file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)


def _is_over(limit_s: float) -> bool:
    """Waits until the rank is through, or the limit has passed.

    It counts steps instead of asking a clock: where the whole job is stopped and goes on, so is this process.
    """
    while True:
        if select.select([0], [], [], min(_STEP_S, limit_s))[0]:
            return True
        limit_s -= _STEP_S
        if limit_s <= 0:
            return False


def _who_did_not_come() -> str:
    if any(name not in os.environ for name in (_SIZE, _HERE, _JOB, _FOLDER)):
        return "another rank did not come to smp.init; which one, the launcher has not told us"
    size, here = int(os.environ[_SIZE]), int(os.environ[_HERE])
    came = [rank for rank in range(size) if _mark("begins", rank).exists()]
    if here == size and len(came) < size:
        found = _processes()
        missing = {rank: found.get(rank) for rank in range(size) if rank not in came}
        return f"rank(s) {_described(missing)} of {size} did not come to smp.init"
    where = f"of the {here} rank(s) on this host ({socket.gethostname()})"
    if len(came) < here:
        return f"{where} only {', '.join(map(str, came))} came to smp.init"
    if here == size:
        stopped = {rank: found for rank, found in _processes().items() if found[1] == "T"}
        return "MPI could not connect the ranks, which are all there" + (
            f", but for {_described(stopped)}" if stopped else ""
        )
    return f"{where} all came to smp.init, so a rank of another host did not, or MPI cannot reach it"


def _not_at_the_end(rank: int) -> dict[int, tuple[int, str]]:
    if any(name not in os.environ for name in (_JOB, _FOLDER)):
        return {}
    return {
        other: found
        for other, found in _processes().items()
        if other != rank and not _mark("ends", other).exists()
    }


def _all_stopped(waiting: dict[int, tuple[int, str]]) -> bool:
    return bool(waiting) and all(state == "T" for _, state in waiting.values())


def _described(ranks: dict[int, tuple[int, str]] | dict[int, tuple[int, str] | None]) -> str:
    def of(rank: int, found: tuple[int, str] | None) -> str:
        if not _PROCESSES.is_dir():
            return f"{rank}"
        if found is None:
            return f"{rank} (has ended)"
        return f"{rank} ({'is stopped' if found[1] == 'T' else 'runs'}, process {found[0]})"

    return ", ".join(of(rank, found) for rank, found in ranks.items())


def _processes() -> dict[int, tuple[int, str]]:
    """By rank, the process and its state ("T": stopped; "t", under a debugger, is not); of this job and host,
    where the system shows it."""
    ranks = {}
    job = os.fsencode(f"{_JOB}={os.environ[_JOB]}")
    for folder in _PROCESSES.glob("[0-9]*") if _PROCESSES.is_dir() else ():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it has ended, or is somebody else's
            continue
        # A rank leads the process group that mpirun has made for it; what it has started does not.
        if job in variables and group == folder.name:
            rank = next((text for text in variables if text.startswith(_RANK.encode() + b"=")), None)
            if rank is not None and state != "Z":
                ranks[int(rank.partition(b"=")[2])] = (int(folder.name), state)
    return dict(sorted(ranks.items()))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
