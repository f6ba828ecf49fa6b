"""Who is let in at a host's door, and who is not: real sockets, real strangers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from smp_lite.entrypoints.hosts.connection import StrangerError, connect
from tests.unit.hosts.strangers import (
    GREETING,
    HANDSHAKE_BYTES,
    KEY,
    LIMIT_S,
    House,
    Wire,
    let_in,
    wait_until,
)

NONCE = bytes(32)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.door.close()


def said_to(port: int, *words: bytes, pause_s: float = 0) -> bytes:
    """All that a caller hears who says `words`, until it is sent away."""
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.settimeout(LIMIT_S)
        heard = bytearray()
        with suppress(ConnectionResetError, BrokenPipeError):
            for word in words:
                stranger.sendall(word)
                time.sleep(pause_s)
            while part := stranger.recv(65536):
                heard += part
        return bytes(heard)


def test_hosts_of_one_job_talk(house: House) -> None:
    with let_in(house.door.port) as first, let_in(house.door.port) as second:
        for number in range(3):
            assert first.call({"say": number}, LIMIT_S) == {"heard": number}
            assert second.call({"say": -number}, LIMIT_S) == {"heard": -number}


@pytest.mark.parametrize("key", [b"", b"a guess", KEY[:-1] + b".", KEY.swapcase()])
def test_another_key_is_told_as_such_and_learns_nothing(key: bytes, house: House) -> None:
    wire = Wire(house.door.port)
    with pytest.raises(StrangerError, match="does not take the proof"):
        connect("localhost", wire.port, key)
    assert len(wire.said["caller"]) == HANDSHAKE_BYTES
    assert len(wire.said["listener"]) == len(GREETING) + 32, "a greeting and a nonce"
    assert house.heard == []


def test_a_recorded_talk_opens_no_door_a_second_time(house: House) -> None:
    wire = Wire(house.door.port)
    with let_in(wire.port) as connection:
        connection.call({"say": "start"}, LIMIT_S)
    heard = said_to(house.door.port, wire.said["caller"])
    assert len(heard) == len(GREETING) + 32
    assert heard != wire.said["listener"][: len(heard)], "each connection has a nonce of its own"
    assert house.heard == ["start"]


def test_a_recorded_host_convinces_no_caller(house: House) -> None:
    wire = Wire(house.door.port)
    with let_in(wire.port) as connection:
        connection.call({"say": "start"}, LIMIT_S)
    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=play, args=(server, wire.said["listener"]), daemon=True).start()
        with pytest.raises(StrangerError, match="gives a wrong proof"):
            connect("localhost", server.getsockname()[1], KEY)


def play(server: socket.socket, record: bytes) -> None:
    with server.accept()[0] as caller:
        caller.sendall(record)
        caller.settimeout(LIMIT_S)
        with suppress(ConnectionResetError):
            while caller.recv(65536):
                pass


def test_a_challenge_that_is_handed_back_proves_nothing(house: House) -> None:
    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=hand_back, args=(server,), daemon=True).start()
        with pytest.raises(StrangerError, match="gives a wrong proof"):
            connect("localhost", server.getsockname()[1], KEY)
    with socket.create_connection(("localhost", house.door.port)) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.sendall(GREETING + NONCE)
        challenge = receive_exactly(stranger, len(GREETING) + 32)
        stranger.sendall(challenge[-32:])
        assert stranger.recv(1) == b""
    assert house.heard == []


def hand_back(server: socket.socket) -> None:
    with server.accept()[0] as caller:
        while part := caller.recv(65536):
            caller.sendall(part)


def receive_exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = source.recv(num_bytes - len(data))
        assert part
        data += part
    return data


def test_a_proof_for_one_door_is_none_for_another_connection(house: House) -> None:
    """Two connections at once, the challenge of one given to a caller of the other."""
    with socket.create_connection(("localhost", house.door.port)) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.sendall(GREETING + NONCE)
        challenge = receive_exactly(stranger, len(GREETING) + 32)
        with socket.create_server(("localhost", 0)) as server:
            threading.Thread(target=call_in_vain, args=server.getsockname(), daemon=True).start()
            with server.accept()[0] as host:
                host.settimeout(LIMIT_S)
                receive_exactly(host, len(GREETING) + 32)  # its own nonce, which the stranger did not use
                host.sendall(challenge)
                stranger.sendall(receive_exactly(host, 32))
        assert stranger.recv(1) == b""
    assert house.heard == []


def call_in_vain(address: str, port: int) -> None:
    with pytest.raises(StrangerError):
        connect(address, port, KEY)


@pytest.mark.parametrize("length", [0, 1, len(GREETING), len(GREETING) + 31, HANDSHAKE_BYTES - 1])
def test_a_handshake_that_breaks_off_ends_at_once(length: int, house: House) -> None:
    words = (GREETING + NONCE + NONCE)[:length]
    with socket.create_connection(("localhost", house.door.port)) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        while stranger.recv(65536):
            pass
    assert time.monotonic() < started + 2
    let_in(house.door.port).close()


@pytest.mark.parametrize("start", [b"", GREETING, GREETING + NONCE], ids=len)
def test_of_a_flood_only_the_length_of_a_handshake_is_read(start: bytes, house: House) -> None:
    with socket.create_connection(("localhost", house.door.port)) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.sendall(start)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            stranger.sendall(bytes(500_000_000))
    let_in(house.door.port).close()


@pytest.mark.parametrize("start", [b"", GREETING, GREETING + NONCE], ids=len)
def test_a_handshake_has_one_deadline_however_slowly_it_drips(
    start: bytes, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smp_lite.entrypoints.hosts.connection._HANDSHAKE_S", 1)
    rest = (GREETING + NONCE + NONCE)[len(start) :]
    started = time.monotonic()
    said_to(house.door.port, start, *[bytes([byte]) for byte in rest], pause_s=0.1)
    assert 0.9 < time.monotonic() - started < 3


@pytest.mark.parametrize("start", [b"", GREETING + NONCE], ids=len)
def test_strangers_who_stay_take_no_hosts_place(start: bytes, house: House, monkeypatch: Any) -> None:
    monkeypatch.setattr("smp_lite.entrypoints.hosts.connection._HANDSHAKE_S", 1000)
    threads = threading.active_count()
    with ExitStack() as stack:
        strangers = []
        for _ in range(200):
            strangers.append(stack.enter_context(socket.create_connection(("localhost", house.door.port))))
            strangers[-1].sendall(start)
        started = time.monotonic()
        with let_in(house.door.port) as connection:
            assert connection.call({"say": "here"}, LIMIT_S) == {"heard": "here"}
            assert time.monotonic() < started + 2
            wait_until(lambda: threading.active_count() - threads < 70)
            # Those who came first had to go; a host that is in stays in.
            strangers[0].settimeout(LIMIT_S)
            while strangers[0].recv(65536):
                pass
            for _ in range(100):
                stack.enter_context(socket.create_connection(("localhost", house.door.port)))
            assert connection.call({"say": "still here"}, LIMIT_S) == {"heard": "still here"}


def test_the_log_tells_of_strangers_once_and_of_no_key(
    house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with pytest.raises(StrangerError):
            connect("localhost", house.door.port, b"a guess")
        said_to(house.door.port, b"GET / HTTP/1.1\r\n\r\n".ljust(200))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"smp-lite: 127.0.0.1 called on port {house.door.port} and did not prove")
    assert KEY.decode() not in line and KEY.hex() not in line
