"""What is left of a launch when its ranks have ended: processes that they have started.

A data loader, a compiler or a server outlives a rank that was killed, and may have left its process group
and its parent behind. What it keeps is its environment, in which the launcher has named a folder that no
other launch has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from smp_lite.errors_record import ERROR_DIR_VARIABLE

__all__ = ["kill_leftovers"]

_PROCESSES = Path("/proc")
_ROUNDS = 10
"""Processes may start others while they are looked for."""


def kill_leftovers(directory: str) -> None:
    """Kill every process that was started with `directory` as its folder for failure records.

    Where the system does not show its processes' environments (it is not Linux), nothing happens.
    """
    for _ in range(_ROUNDS):
        found = list(_started_with(f"{ERROR_DIR_VARIABLE}={directory}".encode()))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return


def _started_with(variable: bytes) -> Iterator[int]:
    for path in _PROCESSES.glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
        if variable in environment.split(b"\0") and int(path.parent.name) != os.getpid():
            yield int(path.parent.name)
