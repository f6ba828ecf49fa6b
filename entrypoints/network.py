"""The hosts of a job on a network: how the first one starts ranks on the others, without sshd.

mpirun starts one daemon of its own on each other host, by a program that is ssh by default. Ours is
`host_agent`: it hands the daemon's arguments to the `train` process that waits on that host, which
starts the daemon with the environment of its host. So every host keeps its own `SM_CURRENT_HOST`,
no image needs an ssh server or keys, and no variable is written anywhere.

A `train` process that starts what it is told over the network must know by whom. Both sides prove
that they know a key derived from the job's own files (`job_key`), by the challenge of
`multiprocessing.connection`; what is started is the Open MPI daemon of this host, whatever the
message says; and messages are JSON, never pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from smp_lite.errors_record import FailureRecord

from .job import Job
from .local import RankReport

__all__ = [
    "KEY_VARIABLE",
    "PORT_VARIABLE",
    "HostService",
    "OtherHosts",
    "daemon_environment",
    "job_key",
    "parse_daemon_command",
    "run_daemon_on",
    "write_agent",
]

KEY_VARIABLE = "SMP_LITE_HOST_KEY"
PORT_VARIABLE = "SMP_LITE_HOST_PORT"

_DAEMONS = ("prted", "orted")
_RETRY_S = 0.2
_CONNECT_S = 2
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
            socket.create_connection(("localhost", self.port), timeout=_CONNECT_S).close()
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
            with _limited_receiving(connection):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            while True:
                message = _receive(connection)
                if message["call"] == "join":
                    is_first_host = self.joined = True
                    _send(connection, {})
                elif message["call"] == "daemon":
                    with self._start(message["arguments"]) as daemon:
                        _send(connection, {"exit_code": daemon.wait()})
                elif message["call"] == "report":
                    _send(connection, asdict(self._report()))
                elif message["call"] == "notice":
                    _send(connection, {"all_know": self._give_notice()})
                elif message["call"] == "end":
                    self.exit_code = message["exit_code"]
                    _send(connection, {})
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
                    connection = _connect(name, port, key)
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
                answers.append(_call(connection, message, _ANSWER_S))
            except (EOFError, OSError):
                connection.close()
                del self._connections[name]
                self.lost.add(name)
        return answers


def run_daemon_on(host: str, arguments: Sequence[str], key: bytes, port: int) -> int:
    """Have `host` start mpirun's daemon and stay until it ends; returns its exit code.

    Raises:
        ConnectionError: the host does not answer.
    """
    try:
        connection = _connect(host, port, key)
    except AuthenticationError:
        raise ConnectionError(f"host {host} answers on port {port}, but with another key") from None
    if connection is None:
        raise ConnectionError(f"host {host} does not answer on port {port}")
    with connection:
        message = {"call": "daemon", "arguments": list(arguments)}
        # As long as the job takes: mpirun ends this process when it has enough of it.
        return int(_call(connection, message, None)["exit_code"])


def parse_daemon_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The host and the daemon's arguments from what mpirun gives the program that it takes for ssh.

    That is the host and a text for a shell: assignments, exports, and last the daemon with arguments.

    Raises:
        ValueError: it is something else.
    """
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    host = words[at] if at < len(words) else ""
    lexer = shlex.shlex(" ".join(words[at + 1 :]), posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    command: list[str] = []
    for token in lexer:
        command = [] if set(token) == {";"} else [*command, token]
    if not command or Path(command[0]).name not in _DAEMONS:
        raise ValueError(f"mpirun asks to start {command[:1]} on {host}, which is not its daemon")
    return host, command[1:]


def write_agent(directory: Path) -> Path:
    """The program that mpirun takes for ssh, as an executable file: mpirun wants a single word."""
    path = directory / "host-agent"
    python = shlex.quote(sys.executable)
    path.write_text(f'#!/bin/sh\nexec {python} -P -m smp_lite.entrypoints.host_agent "$@"\n')
    path.chmod(0o700)
    return path


def daemon_environment(mpirun: str) -> dict[str, str]:
    """What the daemon needs to find its own files, wherever Open MPI is installed."""
    prefix = str(Path(mpirun).parent.parent)
    return {"PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix, "OPAL_PREFIX": prefix}


def _connect(host: str, port: int, key: bytes) -> Connection | None:
    """A connection, or None where nobody answers (yet).

    Raises:
        AuthenticationError: who answers has another key.
    """
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as plain:
            plain.settimeout(None)
            connection = Connection(os.dup(plain.fileno()))
    except OSError:
        return None
    try:
        with _limited_receiving(connection):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | EOFError | AssertionError):  # the last: no challenge came
            return None
        raise


@contextmanager
def _limited_receiving(connection: Connection) -> Iterator[None]:
    """Meanwhile receiving fails after a while, for something that listens or calls and then keeps silent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _CONNECT_S, 0))
        yield
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _call(connection: Connection, message: Mapping[str, Any], limit_s: float | None) -> dict[str, Any]:
    _send(connection, message)
    if not connection.poll(limit_s):
        raise TimeoutError(f"no answer to {message['call']!r} within {limit_s:g} s")
    return _receive(connection)


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message
