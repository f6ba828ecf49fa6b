"""Starts a `LaunchPlan` on this machine and stays with it until nothing of it is left.

What a person is promised: every line carries its rank; when one rank fails, all stop; the first
failure, with its traceback, is the last thing on the screen, and its exit code is the launcher's;
Ctrl-C and SIGTERM end the ranks too, after a notice (SIGUSR1) and a time of grace where one is given.

The notice is not SIGTERM: mpirun answers that by killing its ranks a moment later, before any of
them could save. It goes to the ranks themselves, on other hosts through those who know them there.

mpirun gets a process group of its own, so that a Ctrl-C in the terminal reaches the launcher alone,
which passes it on once: mpirun answers a second signal by leaving without its ranks. The price is
that ranks cannot read the keyboard; a redirected standard input reaches rank 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from smp_lite.errors_record import ERROR_DIR_VARIABLE, FailureRecord, read_failures

from ..mpi.launch_plan import LaunchPlan
from ..mpi.mpirun import kill_ranks, notify_ranks, own_memory_folder, own_session_folder, stop_mpirun
from .channels import Channels
from .ending import Ending, decide_ending
from .leftovers import kill_leftovers
from .screen import MPIRUN, CannotShow, Screen

__all__ = ["Notice", "RankReport", "RemoteRanks", "run_local", "stop_requests"]

_POLL_S = 0.1
_FAILURE_GRACE_S = 5.0
"""How long mpirun may take to stop the other ranks once one has left its failure record, or mpirun has said
that one died: seldom, where a rank dies while another connects to it, mpirun 5 then waits for itself."""
_STOP_GRACE_S = 3.0
"""How long mpirun may take to stop its ranks when it is asked to, before all are killed."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class RankReport:
    """How ranks have fared: the records of those that failed, and by rank what each printed last."""

    failures: Sequence[FailureRecord] = ()
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)


class RemoteRanks(Protocol):
    """The ranks on other hosts, as the launcher on the first one knows them."""

    @property
    def lost(self) -> Collection[str]:
        """The hosts that have not answered when they were asked."""

    def give_notice(self) -> bool:
        """Tell those that have come, once each, that the job is about to be stopped; whether that is all."""

    def report(self) -> RankReport:
        """How they have fared."""


def run_local(
    plan: LaunchPlan,
    num_ranks: int,
    inherited: Mapping[str, str],
    *,
    grace_s: float = 0.0,
    remote: RemoteRanks | None = None,
) -> Ending:
    """Run `plan` to its end.

    Args:
        plan: what to start.
        num_ranks: how many of its ranks, from rank 0 on, are processes of this machine.
        inherited: the environment to start from.
        grace_s: seconds that the ranks get between the notice and their end when the launcher is told
            to stop; being told twice ends them. Ranks that end by themselves meanwhile decide the exit
            code.
        remote: the other ranks.

    Returns:
        The ending; its exit code is 128 + n where signal n stopped the launcher.
    """
    _open_closed_streams()
    unwritable = ""
    terminals = {name for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)) if stream.isatty()}
    with (
        tempfile.TemporaryDirectory(prefix="smp-lite-") as directory,
        _memory_folder() as memory,
        Channels(Path(directory), range(num_ranks), terminals) as channels,
        stop_requests() as requests,
    ):
        screen = Screen(terminals)
        environment = {**plan.full_environment(inherited), ERROR_DIR_VARIABLE: directory}
        environment |= own_session_folder(directory, plan.argv, environment)
        if memory is not None and remote is None:  # other hosts do not have the folder
            environment |= own_memory_folder(memory, plan.argv, environment)
        with subprocess.Popen(
            plan.argv,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_launcher,
        ) as process:
            try:
                assert process.stdout is not None
                channels.add(process.stdout.fileno(), (MPIRUN, "stdout"))
                watch = _Watch(process, Path(directory), Notice(channels, num_ranks), remote, grace_s)
                watch.follow(channels, screen, requests)
            except BrokenPipeError:
                requests.append(signal.SIGPIPE)
            except CannotShow as error:
                unwritable = f"{error}"
            finally:
                if process.poll() is None:
                    stop_mpirun(process, _STOP_GRACE_S)
                kill_ranks(channels.rank_pids())
                kill_leftovers(directory)
            try:
                screen.take(channels, timeout_s=0)  # before mpirun's pipe is closed
                screen.close()
            except BrokenPipeError:
                requests.append(signal.SIGPIPE)
            except CannotShow as error:
                unwritable = f"{error}"
        if unwritable:
            return Ending(1, None, unwritable)
        if signal.SIGPIPE in requests:
            return Ending(128 + signal.SIGPIPE)
        if requests and not watch.ended_alone:
            return Ending(128 + requests[0], None, f"stopped by {requests[0].name}")
        others = remote.report() if remote is not None else RankReport()
        failures = [*read_failures(directory), *others.failures]
        failures.sort(key=lambda failure: failure.time_ns)
        return decide_ending(
            failures,
            screen.messages.death,
            process.returncode,
            {**others.last_lines, **screen.last_lines},
            mpirun_lines=screen.messages.shown,
            lost_hosts=sorted(remote.lost) if remote is not None else (),
        )


def _open_closed_streams() -> None:
    """Give what was closed (`>&-`) to nobody, where Python drops it too: else the next file that is opened
    takes its number, and gets what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened != descriptor:
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _memory_folder() -> AbstractContextManager[str | None]:
    """A folder in memory for what ranks share; None: this machine has no such place, and Open MPI takes its
    session's folder."""
    if not os.access(_MEMORY, os.W_OK):
        return nullcontext()
    return tempfile.TemporaryDirectory(prefix="smp-lite-", dir=_MEMORY, ignore_cleanup_errors=True)


class Notice:
    """The notice to the ranks of this machine, each of which gets it once.

    Args:
        channels: where the ranks tell their process ids, and only once they listen: one that has not come as
            far as that would die of the notice.
        num_ranks: how many will come.
    """

    def __init__(self, channels: Channels, num_ranks: int) -> None:
        self._channels = channels
        self._num_ranks = num_ranks
        self._told: set[int] = set()

    def give(self) -> bool:
        """Tell those that have come and do not know; whether all know now."""
        all_have_come = len(self._channels.told_pids()) == self._num_ranks
        pids = set(self._channels.rank_pids()) - self._told
        notify_ranks(pids)
        self._told |= pids
        return all_have_come


class _Watch:
    """Stays with mpirun until it ends by itself, is told to stop, or takes too long over either."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        directory: Path,
        notice: Notice,
        remote: RemoteRanks | None,
        grace_s: float,
    ) -> None:
        self._process = process
        self._directory = directory
        self._notices = [notice.give] + ([remote.give_notice] if remote is not None else [])
        self._grace_s = grace_s
        self._ended_alone = False
        self._deadline = float("inf")

    @property
    def ended_alone(self) -> bool:
        """Whether mpirun ended without being killed by us."""
        return self._ended_alone

    def follow(self, channels: Channels, screen: Screen, requests: list[signal.Signals]) -> None:
        """Pass output on meanwhile."""
        while self._process.poll() is None and time.monotonic() < self._deadline:
            screen.take(channels, _POLL_S)
            if screen.messages.death is not None or any(self._directory.glob("*.failure.json")):
                self._end_within(_FAILURE_GRACE_S)
            if requests:
                self._end_within(self._grace_s if len(requests) == 1 else 0)
                self._give_notice()
        self._ended_alone = self._process.poll() is not None

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _give_notice(self) -> None:
        if self._grace_s:
            self._notices = [give for give in self._notices if not give()]


def _end_with_launcher() -> None:
    """In mpirun before it starts: have the kernel send it SIGTERM should the launcher be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def stop_requests() -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask the launcher to stop, in place of dying from them."""
    requests: list[signal.Signals] = []

    def remember(number: int, frame: FrameType | None) -> None:
        requests.append(signal.Signals(number))

    # What is ignored stays so: nohup ignores SIGHUP for the launcher, a shell SIGINT for a background job.
    heard = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, remember) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
