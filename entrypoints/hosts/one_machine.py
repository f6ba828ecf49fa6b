"""The hosts of a job, played on one machine: how their `train` processes find one another.

Each host has its own `train` process and its own `/opt/ml` tree. They meet in a folder that they
share: a host that is ready leaves a file with the environment and the working directory of its
ranks; the first host waits for these files, starts all ranks itself by one mpirun, and leaves a
file with the outcome. Each rank then takes the environment of its host (`enter_host`). Nothing is
sent over a network, so no ports, no names to resolve and no rights are needed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["HOSTS_VARIABLE", "Host", "MeetingPlace", "enter_host", "write_hosts"]

HOSTS_VARIABLE = "SMP_LITE_HOSTS_FILE"
"""Names a file with the hosts of a job on one machine, for the ranks."""

_POLL_S = 0.05


@dataclass(frozen=True)
class Host:
    """What the ranks of one host start with."""

    name: str
    environment: Mapping[str, str]
    directory: str
    pid: int


class MeetingPlace:
    """The shared folder, as seen by one of `hosts`."""

    def __init__(self, directory: Path, hosts: Sequence[str]) -> None:
        self._directory = directory
        self._hosts = hosts
        self._outcome = directory / "outcome.json"

    def announce(self, host: Host) -> None:
        """Tell the others that this host is ready."""
        _write(self._file_of(host.name), asdict(host))

    def announce_failure(self, name: str, text: str) -> None:
        """Tell the others that the host `name` will not come, and why."""
        _write(self._directory / f"{name}.failed.json", {"text": text})

    def wait_for_all(self, limit_s: float) -> list[Host]:
        """All hosts, in the job's order.

        Raises:
            TimeoutError: some host did not come within `limit_s` seconds; names it.
            ValueError: some host cannot come; names it and says why.
        """
        deadline = time.monotonic() + limit_s
        while absent := [name for name in self._hosts if not self._file_of(name).exists()]:
            self._check_failures()
            if time.monotonic() > deadline:
                raise TimeoutError(f"host(s) {', '.join(absent)} did not come within {limit_s:g} s")
            time.sleep(_POLL_S)
        return [Host(**json.loads(self._file_of(name).read_text())) for name in self._hosts]

    def announce_outcome(self, exit_code: int) -> None:
        _write(self._outcome, {"exit_code": exit_code})

    def wait_for_outcome(self, limit_s: float) -> int:
        """The exit code of the first host, which has `limit_s` seconds to come; a job may then take as
        long as it wants.

        Raises:
            TimeoutError: the first host did not come, or ended without an outcome.
            ValueError: it cannot come; says why.
        """
        first = self._hosts[0]
        deadline = time.monotonic() + limit_s
        while not self._outcome.exists():
            if self._file_of(first).exists():
                pid = json.loads(self._file_of(first).read_text())["pid"]
                if not _runs(pid) and not self._outcome.exists():
                    raise TimeoutError(f"host {first} ended and left no outcome")
            else:
                self._check_failures()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"host {first} did not come within {limit_s:g} s")
            time.sleep(_POLL_S)
        return int(json.loads(self._outcome.read_text())["exit_code"])

    def _check_failures(self) -> None:
        for path in self._directory.glob("*.failed.json"):
            name = path.name.removesuffix(".failed.json")
            raise ValueError(f"host {name} could not start: {json.loads(path.read_text())['text']}")

    def _file_of(self, name: str) -> Path:
        return self._directory / f"{name}.host.json"


def write_hosts(path: Path, hosts: Sequence[Host], processes_per_host: int) -> None:
    """Leave for the ranks which host each of them is on."""
    _write(path, {"processes_per_host": processes_per_host, "hosts": [asdict(host) for host in hosts]})


def enter_host(rank: int) -> None:
    """Take the environment and the directory of this rank's host, if the job has several."""
    path = os.environ.get(HOSTS_VARIABLE)
    if path is None:
        return
    content = json.loads(Path(path).read_text())
    host = Host(**content["hosts"][rank // content["processes_per_host"]])
    os.environ.update(host.environment)
    os.chdir(host.directory)


def _write(path: Path, content: object) -> None:
    """Create `path` whole, readable by this user only: environments hold secrets."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
