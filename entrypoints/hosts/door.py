"""The door of a host: a port on which only those who have the job's key get further than a handshake.

Anybody can call, and many may. Each caller has a thread while it proves itself, for a few seconds at most
(`connection`), so one that says nothing, or says it slowly, keeps nobody waiting. There is room for a limited
number of such callers, and when all of it is taken the one that has come first must go. A host of the job
needs one round trip, so it gets in unless that many others call within that time; then it calls again.

Strangers are told nothing. The log tells of the first one.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from .connection import Connection, answer

__all__ = ["Door"]

_ROOM = 64
_BACKLOG = 128
_POLL_S = 0.2


class Door:
    """Listens until it is closed.

    Args:
        key: of the job.
        port: to listen on, on all of this host's addresses; 0 takes a free one.
        enter: takes the connection of a host that has proved itself, and a thread for it; it closes the
            connection.
    """

    def __init__(self, key: bytes, port: int, enter: Callable[[Connection], None]) -> None:
        self._key = key
        self._enter = enter
        self._listener = socket.create_server(("", port), backlog=_BACKLOG)
        self._listener.settimeout(_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self._callers: dict[socket.socket, None] = {}
        """Those who have not proved themselves yet, in the order in which they came."""
        self._lock = threading.Lock()
        self._told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more; who is in stays."""
        self._closing.set()
        self._thread.join()
        self._listener.close()
        with self._lock:
            for caller in self._callers:
                _send_away(caller)

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                caller, address = self._listener.accept()
                self._make_room_for(caller)
                threading.Thread(target=self._answer, args=(caller, address[0]), daemon=True).start()
            except TimeoutError:
                continue
            except (OSError, RuntimeError):  # it has hung up, or this process has no files or threads left
                self._closing.wait(_POLL_S)

    def _make_room_for(self, caller: socket.socket) -> None:
        with self._lock:
            if len(self._callers) == _ROOM:
                first = next(iter(self._callers))
                del self._callers[first]
                _send_away(first)
            self._callers[caller] = None

    def _answer(self, caller: socket.socket, address: str) -> None:
        try:
            connection = answer(caller, self._key)
        except (OSError, EOFError) as error:
            caller.close()
            self._tell(address, error)
            return
        finally:
            with self._lock:
                self._callers.pop(caller, None)
        self._enter(connection)

    def _tell(self, address: str, error: Exception) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told and not self._closing.is_set():
            print(
                f"smp-lite: {address} called on port {self.port} and did not prove to be a host of this job "
                f"({error}): sent away, as others will be without a word",
                file=sys.stderr,
            )


def _send_away(caller: socket.socket) -> None:
    """Wakes the thread that listens to the caller, which then closes the connection."""
    with suppress(OSError):  # it has gone by itself
        caller.shutdown(socket.SHUT_RDWR)
