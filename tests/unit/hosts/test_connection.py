"""What a host hears once it is let in: each message once, in order, unchanged, or none any more."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from smp_lite.entrypoints.hosts.connection import LONGEST_MESSAGE, StrangerError
from tests.unit.hosts.strangers import HANDSHAKE_BYTES, LIMIT_S, House, Wire, let_in, wait_until


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.door.close()


@pytest.mark.parametrize("place", [0, 3, 4, 35, 36, -1], ids=str)
def test_a_changed_byte_ends_the_connection(place: int, house: House) -> None:
    """In the length, in the signature, and in the message itself."""

    def change(who: str, said: bytes) -> bytes:
        if who == "listener" or len(said) <= HANDSHAKE_BYTES:
            return said
        at = HANDSHAKE_BYTES + place if place >= 0 else len(said) - 1
        return said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]

    with let_in(Wire(house.door.port, change).port) as connection:
        connection.send({"say": "start"})
        with pytest.raises((EOFError, ConnectionResetError, TimeoutError)):
            connection.receive(1)
    assert house.heard == []
    assert isinstance(house.end(), StrangerError | EOFError)


def test_a_changed_answer_is_not_taken(house: House) -> None:
    def change(who: str, said: bytes) -> bytes:
        return said.replace(b"start", b"break") if who == "listener" else said

    caught = pytest.raises(StrangerError, match="has not the signature")
    with let_in(Wire(house.door.port, change).port) as connection, caught:
        connection.call({"say": "start"}, LIMIT_S)


@pytest.mark.parametrize("times", [2, 5])
def test_a_message_that_is_repeated_is_not_heard_again(times: int, house: House) -> None:
    def change(who: str, said: bytes) -> bytes:
        return said[:HANDSHAKE_BYTES] + said[HANDSHAKE_BYTES:] * times if who == "caller" else said

    with let_in(Wire(house.door.port, change).port) as connection:
        assert connection.call({"say": "start"}, LIMIT_S) == {"heard": "start"}
        assert isinstance(house.end(), StrangerError)
    assert house.heard == ["start"]


def test_a_message_that_is_left_out_is_missed(house: House) -> None:
    lengths = []

    def change(who: str, said: bytes) -> bytes:
        if who == "caller":
            lengths.append(len(said))
            if len(said) > HANDSHAKE_BYTES:
                return said[:HANDSHAKE_BYTES] + said[first_end:]
        return said

    first_end = 0
    wire = Wire(house.door.port, change)
    with let_in(wire.port) as connection:
        first_end = HANDSHAKE_BYTES + 36 + len(b'{"say": 1}')
        connection.send({"say": 1})
        wait_until(lambda: len(wire.said["caller"]) == first_end)
        connection.send({"say": 2})
        assert isinstance(house.end(), StrangerError)
    assert house.heard == []


def test_a_message_that_is_sent_back_is_not_taken_for_an_answer(house: House) -> None:
    said: list[bytes] = []

    def change(who: str, so_far: bytes) -> bytes:
        if who == "caller":
            said.append(so_far[HANDSHAKE_BYTES:])
            return so_far
        return so_far[:HANDSHAKE_BYTES] + said[-1]

    caught = pytest.raises(StrangerError, match="has not the signature")
    with let_in(Wire(house.door.port, change).port) as connection, caught:
        connection.call({"say": "start"}, LIMIT_S)


def test_a_message_of_another_connection_is_not_heard(house: House) -> None:
    """Of the same job, of the same number: the keys of a connection are its own."""
    wire = Wire(house.door.port)
    with let_in(wire.port) as first:
        first.call({"say": "start"}, LIMIT_S)
        message = wire.said["caller"][HANDSHAKE_BYTES:]
        with let_in(house.door.port) as second:
            second._plain.sendall(message)
            assert isinstance(house.end(), StrangerError)
    assert house.heard == ["start"]


def test_a_message_that_is_too_long_is_not_waited_for(house: House) -> None:
    with let_in(house.door.port) as connection:
        connection._plain.sendall(struct.pack("!I", LONGEST_MESSAGE + 1) + bytes(32))
        assert "was announced" in str(house.end())


def test_a_message_that_is_too_long_is_not_sent(house: House) -> None:
    with let_in(house.door.port) as connection:
        with pytest.raises(ValueError, match="is longer than"):
            connection.send({"say": "." * LONGEST_MESSAGE})
        assert connection.call({"say": "short"}, LIMIT_S) == {"heard": "short"}


def test_a_message_that_breaks_off_is_an_end(house: House) -> None:
    with let_in(house.door.port) as connection:
        connection._plain.sendall(struct.pack("!I", 100) + bytes(50))
    assert isinstance(house.end(), EOFError)


def test_a_message_that_stays_away_is_waited_for_with_a_limit(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smp_lite.entrypoints.hosts.connection._TRANSFER_S", 0.5)
    with let_in(house.door.port) as connection:
        connection._plain.sendall(struct.pack("!I", 100) + bytes(40))  # and not the other 92
        assert isinstance(house.end(), TimeoutError)
        with pytest.raises((TimeoutError, EOFError)):
            connection.receive(0.2)


def test_a_long_message_arrives(house: House) -> None:
    with let_in(house.door.port) as connection:
        text = "long" * 1_000_000
        assert connection.call({"say": text}, LIMIT_S) == {"heard": text}
