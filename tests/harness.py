"""Runs functions and scripts on real MPI processes from inside a test.

`run_distributed("tests.transparency.cases:gpt", world_size=2)` calls that function in every rank
and returns what the ranks returned. The ranks of one world size stay alive between calls, because
importing torch costs seconds; a rank that fails, dies or hangs costs its whole pool, and the next
call starts a new one. Only those used last stay, or they would fill the machine's memory. Each
rank talks to the test over its own Unix socket and writes into its own log, so a failure shows the
first cause and who said what; after a timeout the logs hold the Python stack of every rank.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from smp_lite.devices import DEVICE_VARIABLE
from smp_lite.entrypoints.mpi.launch_plan import plan_mpirun
from smp_lite.entrypoints.mpi.mpirun import find_mpirun, own_memory_folder, stop_mpirun
from smp_lite.errors_record import ERROR_DIR_VARIABLE, FailureRecord, read_failures

__all__ = ["WorldPool", "run_distributed", "run_script"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 150.0
_PEERS_GRACE_S = 0.5
"""How long to wait for an earlier failure of another rank once one rank has failed."""
_STOP_GRACE_S = 5.0
_TAIL_LINES = 40
_MOST_RANKS = 12
"""How many ranks may stay alive between calls: each holds a few hundred MB."""

MEMORY_VARIABLE = "SMP_LITE_TESTS_MEMORY"
"""A folder in which each mpirun of this process of pytest gets one for the memory that its ranks share."""

DEVICES_VARIABLE = "SMP_LITE_PRETENDED_DEVICES"
"""How many pretended devices (`tests.pretended_device`) a process finds; unset: there is no such device."""

KIND_VARIABLE = "SMP_LITE_TESTS_DEVICE"
"""Set by pytest's ``--device``: see `tests.default_device`, which imports torch."""

REAL = -1
"""Instead of a number of pretended devices: whatever accelerator the machine has."""

EVERYTHING = -2
"""What pytest's ``--device`` makes of no devices: all tensors are on such a one."""

EVERYTHING_VARIABLE = "SMP_LITE_TESTS_EVERYTHING"
"""Says so to the processes."""

_pools: dict[tuple[int, int], WorldPool] = {}  # the last used comes last


def run_distributed(
    function: str,
    world_size: int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float = 150.0,
    fresh: bool = False,
    devices: int = 0,
    fails: bool = False,
) -> list[Any]:
    """Call `function` ("package.module:name") in `world_size` ranks; their results, by rank.

    parameters: the SMP parameters, set in the environment for the time of the call.
    fresh: start new processes for this call alone.
    devices: how many pretended devices they find; 0: they use the CPU; `REAL`: what the machine has.
    fails: that is what the test expects: processes that have all come back from it take the next call.

    Raises AssertionError with the first failing rank's traceback and the output of all ranks.
    """
    if devices > 0:
        devices = _for_pretended(devices)
    elif devices == 0 and KIND_VARIABLE in os.environ:
        devices = EVERYTHING
    if fresh:
        pool = WorldPool(world_size, devices=devices)
        try:
            return pool.run(function, kwargs, parameters, timeout_s, fails=fails)
        finally:
            pool.close()
    pool = _pools.pop((world_size, devices), None)
    if pool is None or not pool.alive:
        while _pools and sum(other.world_size for other in _pools.values()) + world_size > _MOST_RANKS:
            _pools.pop(next(iter(_pools))).close()
        pool = WorldPool(world_size, devices=devices)
    _pools[world_size, devices] = pool
    return pool.run(function, kwargs, parameters, timeout_s, fails=fails)


class WorldPool:
    """`world_size` MPI processes that wait for functions to call.

    With `keeps_sessions` what one call has set up is there in the next one.
    """

    def __init__(self, world_size: int, *, keeps_sessions: bool = False, devices: int = 0) -> None:
        self.world_size = world_size
        self._devices = devices
        self._keeps_sessions = keeps_sessions
        self._directory = Path(tempfile.mkdtemp(prefix="smp-lite-pool-"))
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._process = self._start()
        try:
            self._accept()
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the processes are there to take another call."""
        return self._process.poll() is None

    def run(
        self,
        function: str,
        kwargs: Mapping[str, Any] | None,
        parameters: Mapping[str, Any] | None,
        timeout_s: float,
        *,
        fails: bool = False,
    ) -> list[Any]:
        """As `run_distributed`, on these processes; a failure ends them, unless one is expected."""
        sizes = {path: path.stat().st_size for path in self._directory.glob("*.log")}
        try:
            keeps = self._keeps_sessions
            job = pickle.dumps((function, dict(kwargs or {}), parameters, keeps, fails))
            for connection in self._connections:
                with suppress(BrokenPipeError):
                    connection.send_bytes(job)
            values, failures, missing = self._collect(timeout_s)
            if not failures and not missing:
                return [values[rank] for rank in range(self.world_size)]
            text = self._explain(failures, missing, timeout_s)
        except BaseException:
            self.kill()
            raise
        ends = not fails or bool(missing)
        if ends:
            self.kill(keep_logs=True)
        output = "".join(_tail(path, sizes.get(path, 0)) for path in sorted(self._logs()))
        if ends:
            shutil.rmtree(self._directory)
        raise AssertionError(f"{function} on {self.world_size} processes: {text}\n{output}")

    def close(self) -> None:
        """Let the processes end as they would by themselves; kill them if they do not."""
        for connection in self._connections:
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S)
        self.kill()

    def kill(self, *, keep_logs: bool = False) -> None:
        """End the processes now."""
        for connection in self._connections:
            connection.close()
        stop_mpirun(self._process, _STOP_GRACE_S, self._pids)
        if not keep_logs:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._directory / "socket"))
        self._listener.listen(self.world_size)
        command = (sys.executable, "-m", "tests.harness_worker", str(self._directory))
        environment = {ERROR_DIR_VARIABLE: str(self._directory), "PYTHONUNBUFFERED": "1"}
        if self._devices > 0:
            environment[DEVICES_VARIABLE] = str(self._devices)
        elif self._devices == EVERYTHING:
            environment[EVERYTHING_VARIABLE] = "1"
        elif self._devices == 0 and _has_gpu():
            environment[DEVICE_VARIABLE] = "cpu"
        if self._devices < 0:
            # Sums of cuBLAS in one order, unless the test has other wishes.
            environment["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with open(self._directory / "mpirun.log", "wb") as log:
            return _mpirun(command, self.world_size, environment, log, log)

    def _accept(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        self._listener.settimeout(0.5)
        accepted: dict[int, Connection] = {}
        with self._listener:
            while len(accepted) < self.world_size:
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    if self.alive and time.monotonic() < deadline:
                        continue
                    output = "".join(_tail(path, 0) for path in sorted(self._logs()))
                    raise AssertionError(f"the processes did not start\n{output}") from None
                peer.setblocking(True)
                connection = Connection(peer.detach())
                self._connections.append(connection)
                rank, pid = pickle.loads(connection.recv_bytes())
                accepted[rank] = connection
                self._pids.append(pid)
        self._connections = [accepted[rank] for rank in range(self.world_size)]

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], list[FailureRecord], list[int]]:
        """Results by rank, failures, and the ranks from which neither came in time."""
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        values: dict[int, Any] = {}
        failures: list[FailureRecord] = []
        lost = False
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left_s):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    lost = True
                    reply = None
                if isinstance(reply, FailureRecord):
                    failures.append(reply)
                elif reply is not None:
                    values[rank] = reply[0]
            if failures or lost:
                deadline = min(deadline, time.monotonic() + _PEERS_GRACE_S)
        missing = [rank for rank in range(self.world_size) if rank not in values]
        return values, failures, [r for r in missing if r not in {f.rank for f in failures}]

    def _explain(self, failures: list[FailureRecord], missing: list[int], timeout_s: float) -> str:
        failures = sorted([*failures, *read_failures(self._directory)], key=lambda failure: failure.time_ns)
        if failures:
            return f"rank {failures[0].rank} failed first:\n{failures[0].text}"
        if not self.alive or self._any_rank_gone():
            return f"ranks {missing} ended without an exception"
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(_PEERS_GRACE_S)
        return f"no result from ranks {missing} within {timeout_s} s; their stacks are below"

    def _any_rank_gone(self) -> bool:
        # A connection at its end is readable; a rank that is merely busy has nothing to read.
        return any(connection.poll() for connection in self._connections)

    def _logs(self) -> list[Path]:
        return list(self._directory.glob("*.log"))


def run_script(
    argv: Sequence[str],
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    timeout_s: float = 150.0,
) -> subprocess.CompletedProcess[str]:
    """Run plain `mpirun -np world_size python argv...` and return its exit code and output.

    options: of mpirun, besides.

    Raises AssertionError with the output where it takes longer than `timeout_s`.
    """
    if DEVICES_VARIABLE in (env or {}):
        _skip_unless_pretendable()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _mpirun((sys.executable, *argv), world_size, env or {}, out, err, options)
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                stop_mpirun(process, _STOP_GRACE_S, _child_pids(process.pid))
        stdout, stderr = (_read_all(file) for file in (out, err))
    if timed_out:
        raise AssertionError(f"{argv[0]} took over {timeout_s} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _mpirun(
    command: Sequence[str],
    world_size: int,
    environment: Mapping[str, str],
    out: Any,
    err: Any,
    options: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    plan = plan_mpirun(
        processes=world_size,
        command=command,
        mpirun=find_mpirun(),
        environment=environment,
        is_root=os.geteuid() == 0,
    )
    if MEMORY_VARIABLE in os.environ:  # pools live beside each other and beside other jobs
        memory = tempfile.mkdtemp(dir=os.environ[MEMORY_VARIABLE])
        own = own_memory_folder(memory, plan.argv, os.environ)
        plan = replace(plan, environment={**plan.environment, **own})
    search_path = os.pathsep.join([str(_REPOSITORY), *filter(None, [os.getenv("PYTHONPATH")])])
    return subprocess.Popen(
        (plan.argv[0], *options, *plan.argv[1:]),
        env=plan.full_environment({**os.environ, "PYTHONPATH": search_path}),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        process_group=0,
    )


def _child_pids(pid: int) -> list[int]:
    texts = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in texts for child in text.split()]


def _read_all(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _for_pretended(devices: int) -> int:
    """In the place of so many pretended devices; skips the running test where there is nothing."""
    if os.environ.get(KIND_VARIABLE) in (None, "pretended"):
        _skip_unless_pretendable()
        return devices
    import torch

    if torch.accelerator.device_count() < devices:
        pytest.skip(f"{devices} devices are needed")
    return REAL


def _skip_unless_pretendable() -> None:
    """Skips the running test where this torch is older than backends in Python are."""
    import torch
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no backends in Python, so no device can be pretended")


def _has_gpu() -> bool:
    """Asked without torch, which the tests of the pure parts never import."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _tail(path: Path, start: int) -> str:
    """The last lines of a log that came after byte `start`, under a heading."""
    lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
    if not lines:
        return ""
    return "\n".join([f"--- {path.stem} ---", *lines[-_TAIL_LINES:], ""])


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        if pool.alive:
            pool.close()
