"""Starts a `LaunchPlan` on this machine and stays with it until nothing of it is left.

What a person is promised: every line carries its rank; when one rank fails, all stop; the first
failure, with its traceback, is the last thing on the screen, and its exit code is the launcher's;
Ctrl-C and SIGTERM end the ranks too.

mpirun gets a process group of its own, so that a Ctrl-C in the terminal reaches the launcher alone,
which passes it on once: mpirun answers a second signal by leaving without its ranks. The price is
that ranks cannot read the keyboard; a redirected standard input reaches rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from smp_lite.errors_record import ERROR_DIR_VARIABLE, FailureRecord, read_failures

from .channels import Channels
from .launch_plan import LaunchPlan
from .mpirun import Death, MpirunMessages, kill_ranks, stop_mpirun
from .output import LineMerger

__all__ = ["run_local"]

_POLL_S = 0.1
_FAILURE_GRACE_S = 5.0
"""How long mpirun may take to stop the other ranks once one has left its failure record."""
_STOP_GRACE_S = 3.0
"""How long mpirun may take to stop its ranks when it is asked to, before all are killed."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MPIRUN = "mpirun"


def run_local(plan: LaunchPlan, num_ranks: int, inherited: Mapping[str, str]) -> int:
    """Run `plan` to its end and return the exit code for the launcher.

    The code is 0, or that of the rank which failed first (128 + n where signal n killed it), or
    128 + n where signal n stopped the launcher.
    """
    terminals = {name for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)) if stream.isatty()}
    with (
        tempfile.TemporaryDirectory(prefix="smp-lite-") as directory,
        Channels(Path(directory), num_ranks, terminals) as channels,
        _stop_requests() as requests,
    ):
        screen = _Screen(terminals)
        environment = {**plan.full_environment(inherited), ERROR_DIR_VARIABLE: directory}
        with subprocess.Popen(
            plan.argv,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        ) as process:
            try:
                assert process.stdout is not None
                channels.add(process.stdout.fileno(), (_MPIRUN, "stdout"))
                _follow(process, Path(directory), channels, screen, requests)
            except BrokenPipeError:
                requests.append(signal.SIGPIPE)
            finally:
                if process.poll() is None:
                    stop_mpirun(process, channels.rank_pids(), _STOP_GRACE_S)
                kill_ranks(channels.rank_pids())
        if requests:
            return 128 + requests[0]
        screen.take(channels, timeout_s=0)
        screen.close()
        return _report(read_failures(directory), screen.messages.death, process.returncode)


class _Screen:
    """The launcher's two output streams, each a `LineMerger`; one where both are one terminal."""

    def __init__(self, terminals: set[str]) -> None:
        self.messages = MpirunMessages()
        live = [("0", name) for name in terminals]
        err = LineMerger(_writer(sys.stderr.fileno()), live)
        out = err if len(terminals) == 2 else LineMerger(_writer(sys.stdout.fileno()), live)
        self._mergers = {"stdout": out, "stderr": err}
        self._mpirun_text = ""

    def take(self, channels: Channels, timeout_s: float) -> None:
        """Show what has come, waiting up to `timeout_s` seconds for it; then all that is there."""
        while batch := list(channels.read(timeout_s)):
            for source, data in batch:
                if source[0] == _MPIRUN:
                    self._take_mpirun(data)
                else:
                    self._mergers[source[1]].feed(source, data)
            timeout_s = 0

    def close(self) -> None:
        """Nothing more comes: show what is still held back."""
        self._take_mpirun(b"\n")
        self._show_mpirun(self.messages.close())
        for merger in self._mergers.values():
            merger.close()

    def _take_mpirun(self, data: bytes) -> None:
        *lines, self._mpirun_text = (self._mpirun_text + data.decode(errors="replace")).split("\n")
        for line in lines:
            self._show_mpirun(self.messages.feed(line.rstrip("\r")))

    def _show_mpirun(self, lines: list[str]) -> None:
        for line in lines:
            self._mergers["stderr"].feed((_MPIRUN, "stdout"), f"{line}\n".encode())


def _follow(
    process: subprocess.Popen[bytes],
    directory: Path,
    channels: Channels,
    screen: _Screen,
    requests: list[signal.Signals],
) -> None:
    """Pass output on until mpirun ends by itself, is asked to stop, or takes too long over it."""
    deadline = float("inf")
    while process.poll() is None and not requests and time.monotonic() < deadline:
        screen.take(channels, _POLL_S)
        if deadline == float("inf") and any(directory.glob("*.failure.json")):
            deadline = time.monotonic() + _FAILURE_GRACE_S


@contextmanager
def _stop_requests() -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask the launcher to stop, in place of dying from them."""
    requests: list[signal.Signals] = []

    def remember(number: int, frame: FrameType | None) -> None:
        requests.append(signal.Signals(number))

    before = {number: signal.signal(number, remember) for number in _STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _report(failures: list[FailureRecord], death: Death | None, mpirun_code: int) -> int:
    """Print the failures, the first one last, and return the exit code."""
    if mpirun_code == 0 and not failures:
        return 0
    # mpirun names the rank that ended first. One that a signal killed had no time for a record, and
    # the records of the others then tell of its loss. In all other cases the earliest record is the
    # cause: a rank may end quietly because a peer has failed.
    recorded = {failure.rank for failure in failures}
    killed = death is not None and death.signal_number is not None and death.rank not in recorded
    first = failures[0] if failures and not killed else None
    for failure in reversed(failures):
        if failure is not first:
            prefix = f"[{failure.rank}] "
            lines = failure.text.rstrip("\n").split("\n")
            print("\n".join(prefix + line for line in lines), file=sys.stderr)
    if first is not None:
        print(f"rank {first.rank} failed first:\n{first.text}", end="", file=sys.stderr)
        return first.exit_code
    if death is None:
        code = mpirun_code if mpirun_code >= 0 else 128 - mpirun_code
        print(f"mpirun ended with exit code {code}", file=sys.stderr)
        return code
    print(f"rank {death.rank} failed first: {death.describe()}", file=sys.stderr)
    if death.signal_number is not None:
        return 128 + death.signal_number
    return death.exit_code or mpirun_code
