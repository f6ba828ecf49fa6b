"""The hosts of a job on a network: how the first one starts ranks on the others, without sshd.

mpirun starts one daemon of its own on each other host, by a program that is ssh by default. Ours is
`host_agent`: it hands the daemon's arguments to the `train` process that waits on that host, which
starts the daemon with the environment of its host (`remote_daemon`). So every host keeps its own
`SM_CURRENT_HOST`, no image needs an ssh server or keys, and no variable is written anywhere.

A `train` process that starts what it is told over the network must know by whom. Both sides prove
that they know a key derived from the job's own files (`job_key`), by the challenge of
`multiprocessing.connection`; what is started is the Open MPI daemon of this host, whatever the
message says; and messages are JSON, never pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from smp_lite.errors_record import FailureRecord

from ..container.job import Job
from ..this_machine.launcher import RankReport
from .connection import call, connect, limited_receiving, receive, send

__all__ = ["KEY_VARIABLE", "PORT_VARIABLE", "HostService", "OtherHosts", "job_key"]

KEY_VARIABLE = "SMP_LITE_HOST_KEY"
PORT_VARIABLE = "SMP_LITE_HOST_PORT"

_RETRY_S = 0.2
_WAKE_S = 2.0
_ANSWER_S = 10.0


def job_key(job: Job) -> bytes:
    """What the hosts of a job know and others do not: a digest of all of its hyperparameters and its ARN."""
    known = [
        dict(job.hyperparameters),
        dict(job.framework_parameters),
        job.hosts,
        os.environ.get("TRAINING_JOB_ARN", ""),
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest().encode()


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
        self._key = key
        self._listener = Listener(("", port), family="AF_INET", backlog=8)
        self._start = start
        self._report = report
        self._give_notice = give_notice
        self._ended = threading.Event()
        self._closing = threading.Event()
        self.port: int = self._listener.address[1]
        self.joined = False
        """Whether the first host has come."""
        self.exit_code: int | None = None
        """The first host's, once it has told it; None where it went away without."""
        threading.Thread(target=self._accept, daemon=True).start()

    def ended(self) -> bool:
        """Whether the first host has told its exit code, or has gone."""
        return self._ended.is_set()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):  # wakes the thread that accepts, and would keep the port
            socket.create_connection(("localhost", self.port), timeout=_WAKE_S).close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # closed, or out of descriptors because of strangers, who do not stay long
                self._closing.wait(_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        is_first_host = False
        try:
            # Here and not in accept(), where a stranger who keeps silent would keep all others out.
            with limited_receiving(connection):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            while True:
                message = receive(connection)
                if message["call"] == "join":
                    is_first_host = self.joined = True
                    send(connection, {})
                elif message["call"] == "daemon":
                    with self._start(message["arguments"]) as daemon:
                        send(connection, {"exit_code": daemon.wait()})
                elif message["call"] == "report":
                    send(connection, asdict(self._report()))
                elif message["call"] == "notice":
                    send(connection, {"all_know": self._give_notice()})
                elif message["call"] == "end":
                    self.exit_code = message["exit_code"]
                    send(connection, {})
                    return
        except (AuthenticationError, EOFError, OSError):
            pass
        except (ValueError, KeyError, TypeError) as error:
            print(f"smp-lite: a message of another host makes no sense: {error!r}", file=sys.stderr)
        finally:
            connection.close()
            if is_first_host:
                self._ended.set()


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
            for name in absent:
                try:
                    connection = connect(name, port, key)
                except AuthenticationError:
                    strangers.add(name)
                    continue
                if connection is not None:
                    self._connections[name] = connection
                    self._ask({"call": "join"}, [name])
                    self.lost.clear()  # they are asked again
            if time.monotonic() > deadline and len(self._connections) < len(names):
                absent = [name for name in names if name not in self._connections]
                known = strangers & set(absent)
                reason = (
                    f"; {', '.join(sorted(known))} answered, but with the key of another job: all hosts need "
                    "the same hyperparameters, hosts and TRAINING_JOB_ARN"
                )
                raise TimeoutError(
                    f"host(s) {', '.join(absent)} did not come within {limit_s:g} s (port {port})"
                    + (reason if known else "")
                )
            time.sleep(_RETRY_S if len(self._connections) < len(names) else 0)

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
                answers.append(call(connection, message, _ANSWER_S))
            except (EOFError, OSError):
                connection.close()
                del self._connections[name]
                self.lost.add(name)
        return answers
