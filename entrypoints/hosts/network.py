"""The hosts of a job on a network: how the first one starts ranks on the others, without sshd.

mpirun starts one daemon of its own on each other host, by a program that is ssh by default. Ours is
`host_agent`: it hands the daemon's arguments to the `train` process that waits on that host, which
starts the daemon with the environment of its host (`remote_daemon`). So every host keeps its own
`SM_CURRENT_HOST`, no image needs an ssh server or keys, and no variable is written anywhere.

A `train` process that starts what it is told over the network must know by whom: by a host that has the
job's secret (`secret`), which it proves before it is heard (`connection`, `door`). What is started is the
Open MPI daemon of this host, whatever the message says.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from smp_lite.errors_record import FailureRecord

from ..this_machine.ending import shortened
from ..this_machine.launcher import RankReport
from .connection import Connection, StrangerError, connect
from .door import Door
from .secret import SECRET_VARIABLE

__all__ = ["PORT_VARIABLE", "HostService", "OtherHosts"]

PORT_VARIABLE = "SMP_LITE_HOST_PORT"

_RETRY_S = 0.2
_ANSWER_S = 10.0
_CALLS_AT_ONCE = 32
_LONGEST_REPORT = 1_000_000
"""Characters of all tracebacks together; what they make of JSON is far below the limit of a message."""


class HostService:
    """What a host that is not the first one offers to the first one, until it says that all is over.

    Args:
        key: of the job.
        port: to listen on, on all of this host's addresses; 0 takes a free one.
        start: starts the daemon with these arguments.
        report: how this host's ranks have fared.
        give_notice: tells the ranks that the job is about to be stopped, and whether all know now.
    """

    def __init__(
        self,
        key: bytes,
        port: int,
        start: Callable[[Sequence[str]], subprocess.Popen[bytes]],
        report: Callable[[], RankReport],
        give_notice: Callable[[], bool],
    ) -> None:
        self._start = start
        self._report = report
        self._give_notice = give_notice
        self._ended = threading.Event()
        self.joined = False
        """Whether the first host has come."""
        self.exit_code: int | None = None
        """The first host's, once it has told it; None where it went away without."""
        self._door = Door(key, port, self._serve)

    @property
    def port(self) -> int:
        return self._door.port

    def ended(self) -> bool:
        """Whether the first host has told its exit code, or has gone."""
        return self._ended.is_set()

    def close(self) -> None:
        self._door.close()

    def _serve(self, connection: Connection) -> None:
        is_first_host = False
        try:
            while True:
                message = connection.receive()
                if message["call"] == "join":
                    is_first_host = self.joined = True
                    connection.send({})
                elif message["call"] == "daemon":
                    with self._start(message["arguments"]) as daemon:
                        connection.send({"exit_code": daemon.wait()})
                elif message["call"] == "report":
                    connection.send(asdict(_short_enough(self._report())))
                elif message["call"] == "notice":
                    connection.send({"all_know": self._give_notice()})
                elif message["call"] == "end":
                    self.exit_code = message["exit_code"]
                    connection.send({})
                    return
                else:
                    raise ValueError(f"there is no call {message['call']!r}")
        except StrangerError as error:
            print(f"smp-lite: a connection with another host is closed: {error}", file=sys.stderr)
        except (EOFError, OSError):
            pass
        except (ValueError, KeyError, TypeError) as error:
            print(f"smp-lite: a message of another host makes no sense: {error!r}", file=sys.stderr)
        finally:
            connection.close()
            if is_first_host:
                self._ended.set()


def _short_enough(report: RankReport) -> RankReport:
    longest = _LONGEST_REPORT // max(len(report.failures), 1)
    failures = [replace(failure, text=shortened(failure.text, longest)) for failure in report.failures]
    return replace(report, failures=failures)


class OtherHosts:
    """The first host's connections to all others.

    Args:
        names: of the hosts.
        limit_s: seconds for all of them to come.

    Raises:
        TimeoutError: names the hosts that did not.
    """

    def __init__(self, names: Sequence[str], key: bytes, port: int, limit_s: float) -> None:
        self._connections: dict[str, Connection] = {}
        self.lost: set[str] = set()
        """The names of those that have not answered when they were asked."""
        strangers: set[str] = set()
        deadline = time.monotonic() + limit_s
        while absent := [name for name in names if name not in self._connections]:
            strangers |= self._call_on(absent, key, port)
            self.lost.clear()  # they are asked again
            absent = [name for name in absent if name not in self._connections]
            if absent and time.monotonic() > deadline:
                known = strangers & set(absent)
                reason = (
                    f"; {', '.join(sorted(known))} answered, but with another key: all hosts need the same "
                    f"{SECRET_VARIABLE}, hyperparameters, hosts and TRAINING_JOB_ARN"
                )
                raise TimeoutError(
                    f"host(s) {', '.join(absent)} did not come within {limit_s:g} s (port {port})"
                    + (reason if known else "")
                )
            time.sleep(_RETRY_S if absent else 0)

    def _call_on(self, names: Sequence[str], key: bytes, port: int) -> set[str]:
        """Call on these hosts, all at once because each may be slow; the names of those with another key."""

        def call_on(name: str) -> Connection | StrangerError | None:
            try:
                return connect(name, port, key)
            except StrangerError as error:
                return error

        with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
            answers = dict(zip(names, pool.map(call_on, names)))
        for name, answer in answers.items():
            if isinstance(answer, Connection):
                self._connections[name] = answer
                self._ask({"call": "join"}, [name])
        return {name for name, answer in answers.items() if isinstance(answer, StrangerError)}

    def report(self) -> RankReport:
        """How all ranks on these hosts have fared; a host that has gone says nothing."""
        answers = self._ask({"call": "report"})
        return RankReport(
            [FailureRecord(**record) for answer in answers for record in answer["failures"]],
            {int(rank): lines for answer in answers for rank, lines in answer["last_lines"].items()},
        )

    def give_notice(self) -> bool:
        """Tell their ranks that the job is about to be stopped; whether all know now."""
        return all(answer["all_know"] for answer in self._ask({"call": "notice"}))

    def end(self, exit_code: int) -> None:
        """Tell them that all is over."""
        self._ask({"call": "end", "exit_code": exit_code})
        for connection in self._connections.values():
            connection.close()

    def _ask(self, message: Mapping[str, Any], names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The answers; a host that has gone, or does not answer in time, gives none now or later."""
        answers = []
        for name in list(self._connections) if names is None else names:
            connection = self._connections[name]
            try:
                answers.append(connection.call(message, _ANSWER_S))
            except (EOFError, OSError):
                connection.close()
                del self._connections[name]
                self.lost.add(name)
        return answers
