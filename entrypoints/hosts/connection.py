"""A connection between two hosts of a job: each proves that it has the job's key, and messages are JSON.

The proof is the challenge of `multiprocessing.connection`. JSON, because a pickle can run anything.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

__all__ = ["call", "connect", "limited_receiving", "receive", "send"]

_CONNECT_S = 2


def connect(host: str, port: int, key: bytes) -> Connection | None:
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
        with limited_receiving(connection):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | EOFError | AssertionError):  # the last: no challenge came
            return None
        raise


@contextmanager
def limited_receiving(connection: Connection) -> Iterator[None]:
    """Meanwhile receiving fails after a while, for something that listens or calls and then keeps silent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _CONNECT_S, 0))
        yield
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def call(connection: Connection, message: Mapping[str, Any], limit_s: float | None) -> dict[str, Any]:
    send(connection, message)
    if not connection.poll(limit_s):
        raise TimeoutError(f"no answer to {message['call']!r} within {limit_s:g} s")
    return receive(connection)


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message
