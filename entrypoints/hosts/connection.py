"""A connection between two hosts of a job: both prove that they have its key, then every message is signed.

    caller -> listener   greeting, nonce          neither side has shown anything yet
    listener -> caller   greeting, nonce
    caller -> listener   proof                    a caller without the key learns nothing but a nonce
    listener -> caller   proof
    both ways            length, signature, message, as often as needed

A proof is a keyed digest (HMAC-SHA256) of both nonces and of the side that gives it. Each side makes a new
nonce for each connection, so a recorded talk proves nothing a second time; and the proofs of the two sides
differ, so nobody answers a challenge by handing it back. From the nonces each side also gets a key for its
signatures. A signature covers the message's number in its direction: a message that was changed, repeated,
left out, put elsewhere or sent back to where it came from ends the connection. Who stands between two hosts
can cut a connection, and no more.

How much is read is known before it is read: the handshake has a fixed length, a message a greatest one. The
whole handshake has one deadline, however slowly the other side says it.

Messages are JSON, because a pickle can run anything. They are signed, not secret: they hold arguments of
mpirun's daemon, exit codes and tracebacks.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

__all__ = ["LONGEST_MESSAGE", "Connection", "StrangerError", "answer", "connect"]

LONGEST_MESSAGE = 32 * 2**20
"""Bytes."""

_GREETING = b"smp_lite hosts 1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEADER = struct.Struct(f"!I{_PROOF_BYTES}s")
_READ_BYTES = 65536
_CALLER_PROVES, _LISTENER_PROVES, _CALLER_SIGNS, _LISTENER_SIGNS = b"1", b"2", b"3", b"4"
"""What a key is derived for."""

_CONNECT_S = 2.0
_HANDSHAKE_S = 5.0
_TRANSFER_S = 30.0
"""How long a message may take from its first part to its last."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After a minute of silence the system itself finds out whether the other host still lives."""


class StrangerError(ConnectionError):
    """Who speaks at the other end has not the job's key, or somebody has changed what was said."""


class Connection:
    """An open connection with a host that has proved itself; of each side, one thread at a time may use it.

    Args:
        plain: the connected socket, which is closed with this.
        sending_key, receiving_key: for the signatures.
    """

    def __init__(self, plain: socket.socket, sending_key: bytes, receiving_key: bytes) -> None:
        self._plain = plain
        self._sending_key, self._receiving_key = sending_key, receiving_key
        self._num_sent = self._num_received = 0
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._plain.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError where the other side has gone, ValueError for a message that is too long."""
        data = json.dumps(message).encode()
        if len(data) > LONGEST_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes is longer than {LONGEST_MESSAGE}")
        signature = _signature(self._sending_key, self._num_sent, data)
        self._num_sent += 1
        self._plain.settimeout(_TRANSFER_S)
        self._plain.sendall(_HEADER.pack(len(data), signature) + data)

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """The next message, waiting up to `limit_s` seconds for it, or as long as it takes.

        Raises:
            StrangerError: it is not what the other side has sent next.
            TimeoutError: none came in time.
            OSError, EOFError: the other side has gone.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        length, signature = _HEADER.unpack(_read(self._plain, _HEADER.size, deadline))
        if length > LONGEST_MESSAGE:
            raise StrangerError(f"a message of {length} bytes was announced")
        data = _read(self._plain, length, time.monotonic() + _TRANSFER_S)
        if not hmac.compare_digest(signature, _signature(self._receiving_key, self._num_received, data)):
            raise StrangerError("a message has not the signature that it must have")
        self._num_received += 1
        message: dict[str, Any] = json.loads(data)
        return message

    def call(self, message: Mapping[str, Any], limit_s: float | None) -> dict[str, Any]:
        """Send a message and return the answer to it; raises as the two."""
        self.send(message)
        return self.receive(limit_s)


def connect(host: str, port: int, key: bytes) -> Connection | None:
    """A connection, or None where nobody answers as a host would (yet).

    Raises:
        StrangerError: who answers has another key.
    """
    try:
        plain = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError:
        return None
    try:
        return _greet(plain, key)
    except BaseException as error:
        plain.close()
        if isinstance(error, OSError | EOFError) and not isinstance(error, StrangerError):
            return None
        raise


def _greet(plain: socket.socket, key: bytes) -> Connection:
    deadline = time.monotonic() + _HANDSHAKE_S
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    plain.sendall(_GREETING + own_nonce)
    nonces = own_nonce + _read_greeting(plain, deadline)
    plain.sendall(_derive(key, _CALLER_PROVES, nonces))
    try:
        proof = _read(plain, _PROOF_BYTES, deadline)
    except (EOFError, ConnectionResetError):
        raise StrangerError("the other side does not take the proof") from None
    if not hmac.compare_digest(proof, _derive(key, _LISTENER_PROVES, nonces)):
        raise StrangerError("the other side gives a wrong proof")
    return Connection(plain, _derive(key, _CALLER_SIGNS, nonces), _derive(key, _LISTENER_SIGNS, nonces))


def answer(plain: socket.socket, key: bytes) -> Connection:
    """The connection with who has called on `plain`.

    Raises:
        StrangerError: who it is has not the key.
        OSError, EOFError: it has gone, or takes too long.
    """
    deadline = time.monotonic() + _HANDSHAKE_S
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = _read_greeting(plain, deadline) + own_nonce
    plain.sendall(_GREETING + own_nonce)
    if not hmac.compare_digest(_read(plain, _PROOF_BYTES, deadline), _derive(key, _CALLER_PROVES, nonces)):
        raise StrangerError("the other side gives a wrong proof")
    plain.sendall(_derive(key, _LISTENER_PROVES, nonces))
    return Connection(plain, _derive(key, _LISTENER_SIGNS, nonces), _derive(key, _CALLER_SIGNS, nonces))


def _read_greeting(plain: socket.socket, deadline: float) -> bytes:
    """The nonce of the other side."""
    if _read(plain, len(_GREETING), deadline) != _GREETING:
        raise ConnectionError("the other side speaks another language")
    return _read(plain, _NONCE_BYTES, deadline)


def _read(plain: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("the other side takes too long")
        plain.settimeout(left)
        part = plain.recv(min(num_bytes - len(data), _READ_BYTES))
        if not part:
            raise EOFError("the other side has gone")
        data += part
    return bytes(data)


def _derive(key: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, purpose + nonces, "sha256")


def _signature(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + data, "sha256")
