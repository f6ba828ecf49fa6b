"""How the launch tests start `smp-lite run`, and how they look for processes left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HANG_S = 90
"""A bound against hanging; a launch takes one to three seconds."""


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
    """Run `smp-lite run args...` in `directory` to its end, output captured."""
    process = subprocess.Popen(
        command(*args),
        cwd=directory,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(text_in, timeout=HANG_S)
    finally:
        process.terminate()  # for one that hangs: killed, it could not end its ranks
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


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
