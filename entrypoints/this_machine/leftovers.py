"""Which processes belong to a launch, and the end of those that outlive its ranks.

A data loader, a compiler or a server outlives a rank that was killed, and may have left its process group
and its parent behind. What it keeps is its environment, in which the launcher has named a folder that no
other launch has. By that, too, a rank is told from a stranger who was given its process id after it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from smp_lite.errors_record import ERROR_DIR_VARIABLE

__all__ = ["belongs_to", "kill_leftovers"]

_PROCESSES = Path("/proc")
_ROUNDS = 10
"""Processes may start others while they are looked for."""


def belongs_to(pid: int, directory: str | os.PathLike[str]) -> bool:
    """Whether the process runs, and was started with `directory` as its folder for failure records.

    Where the system does not show its processes' environments (it is not Linux), always.
    """
    if not _PROCESSES.is_dir():
        return True
    try:
        environment = (_PROCESSES / str(pid) / "environ").read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return False
    return _variable(directory) in environment.split(b"\0")


def kill_leftovers(directory: str | os.PathLike[str]) -> None:
    """Kill every process that was started with `directory` as its folder for failure records.

    Where the system does not show its processes' environments (it is not Linux), nothing happens.
    """
    for _ in range(_ROUNDS):
        found = list(_all_of(directory))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return


def _all_of(directory: str | os.PathLike[str]) -> Iterator[int]:
    if _PROCESSES.is_dir():
        pids = (int(path.name) for path in _PROCESSES.glob("[0-9]*"))
        yield from (pid for pid in pids if pid != os.getpid() and belongs_to(pid, directory))


def _variable(directory: str | os.PathLike[str]) -> bytes:
    return os.fsencode(f"{ERROR_DIR_VARIABLE}={os.fspath(directory)}")
