"""How the launch tests start `smp-lite run`, and how they look for processes left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from smp_lite.entrypoints.mpi.mpirun import find_mpirun

HANG_S = 200
"""A bound against hanging; a launch takes one to three seconds, of a machine that has the time for it."""

WAIT_S = 120
"""The limit of each wait within the library, so that it says for whom it waited before we end it."""


def command(*args: str) -> list[str]:
    """The argument list of `smp-lite run args...` under this Python."""
    return [sys.executable, "-m", "smp_lite.cli", "run", *args]


def hear_signals() -> None:
    """In a child before it starts: let it hear what ends a program in a terminal. Where the tests run under
    nohup, or in the background of a shell, all that they start would ignore it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """In a child before it starts: what nohup and such a shell do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def launch(
    directory: Path, *args: str, env: dict[str, str] | None = None, text_in: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `smp-lite run args...` in `directory` to its end, output captured.

    Raises:
        AssertionError: it hangs; with what it has printed, and the stacks of all its Python processes.
    """
    process = subprocess.Popen(
        command(*args),
        cwd=directory,
        env={"PYTHONFAULTHANDLER": "1", "SMP_LITE_WATCHDOG_S": str(WAIT_S), **os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(text_in, timeout=HANG_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{args} hangs:\n{_last_words(process)}") from None
    finally:
        process.terminate()  # for one that hangs: killed, it could not end its ranks
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def launch_plainly(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `mpirun -np 2 python args...` in `directory` to its end, output captured."""
    as_root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return subprocess.run(
        [find_mpirun(), "--oversubscribe", "-np", "2", sys.executable, *args],
        cwd=directory,
        env={"SMP_LITE_WATCHDOG_S": str(WAIT_S), **os.environ, **as_root},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def _last_words(process: subprocess.Popen[str]) -> str:
    """Ends the job's processes by a signal at which Python tells where each of its threads is."""
    for pid in reversed(_descendants(process.pid)):
        with contextlib.suppress(OSError):
            if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                os.kill(pid, signal.SIGABRT)
                time.sleep(0.2)
    try:
        return "\n".join(process.communicate(timeout=10))
    except subprocess.TimeoutExpired:
        process.kill()
        return "\n".join(process.communicate())


def _descendants(pid: int) -> list[int]:
    """The process and all that it has started, which is on Linux to be read."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _descendants(child))]


def write(directory: Path, name: str, text: str) -> Path:
    """A file with `text` after the lines that tell a script its rank."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("import os, sys\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n" + text)
    return path


def processes_mentioning(path: Path) -> list[int]:
    """Ids of the processes that have `path` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue  # it ended while we looked
        if os.fsencode(path) in words:
            found.append(int(entry.parent.name))
    return found


def left_behind(path: Path) -> list[int]:
    """The processes with `path` in their command line that stay. What was killed goes a moment later, when a
    busy machine gets to it."""
    deadline = time.monotonic() + 5
    while found := processes_mentioning(path):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found
