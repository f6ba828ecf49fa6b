"""A host behind its door, and somebody on the wire in front of it, for tests of who is let in and heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from smp_lite.entrypoints.hosts.connection import Connection, connect
from smp_lite.entrypoints.hosts.door import Door

KEY = b"the key of the job".ljust(32)
GREETING = b"smp_lite hosts 1"
HANDSHAKE_BYTES = len(GREETING) + 32 + 32
"""What each side says before the first message."""
LIMIT_S = 20.0


class House:
    """A door, behind which a host repeats what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.ends: list[BaseException] = []
        self.door = Door(KEY, 0, self._enter)

    def _enter(self, connection: Connection) -> None:
        with connection:
            try:
                while True:
                    message = connection.receive()
                    self.heard.append(message["say"])
                    connection.send({"heard": message["say"]})
            except (OSError, EOFError) as error:
                self.ends.append(error)

    def end(self) -> BaseException:
        """How the connection of the one host that was let in has ended."""
        wait_until(lambda: len(self.ends) > 0)
        (end,) = self.ends
        return end


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def let_in(port: int) -> Connection:
    connection = connect("localhost", port, KEY)
    assert connection is not None
    return connection


class Wire:
    """Somebody between a caller and a door, who keeps what each says and may change what is passed on.

    change: gets the name of who speaks and all that it has said so far; returns what to pass on of that, in
        all.
    """

    def __init__(self, port: int, change: Callable[[str, bytes], bytes] = lambda who, said: said) -> None:
        self.said = {"caller": b"", "listener": b""}
        self._change = change
        self._server = socket.create_server(("localhost", 0))
        self.port: int = self._server.getsockname()[1]
        self._door = port
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        caller = self._server.accept()[0]
        listener = socket.create_connection(("localhost", self._door))
        threading.Thread(target=self._pass, args=("listener", listener, caller), daemon=True).start()
        self._pass("caller", caller, listener)
        self._server.close()

    def _pass(self, who: str, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while part := source.recv(65536):
                self.said[who] += part
                changed = self._change(who, self.said[who])
                target.sendall(changed[passed:])
                passed = len(changed)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
