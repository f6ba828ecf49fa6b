"""The hosts' talk: who may start a daemon, which program that is, and how silence is noticed."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from smp_lite.entrypoints.hosts.connection import LONGEST_MESSAGE, connect
from smp_lite.entrypoints.hosts.network import HostService, OtherHosts
from smp_lite.entrypoints.hosts.remote_daemon import parse_daemon_command, run_daemon_on
from smp_lite.entrypoints.this_machine.launcher import RankReport
from smp_lite.errors_record import FailureRecord

KEY = b"the key of the job"
REPORT = RankReport([FailureRecord(rank=1, time_ns=7, exit_code=3, text="the cause")], {1: ["last words"]})

OPEN_MPI_5 = (
    "PRTE_PREFIX=/venv;export PRTE_PREFIX;LD_LIBRARY_PATH=/venv/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    '/venv/bin/prted --allow-run-as-root --prtemca ess "env" --prtemca prte_hnp_uri '
    '"prterun-vm@0.0;tcp://192.0.2.2:43207:64,24" --tree-spawn'
)
OPEN_MPI_4 = (
    'PATH=/usr/bin:$PATH ; export PATH ; /usr/bin/orted -mca ess "env" -mca orte_node_regex '
    '"algo-[1:1-2]@0(2)"'
)


@pytest.fixture
def answers() -> list[bool]:
    """What the service says to notices: the last one first."""
    return [True, False]


@pytest.fixture
def service(answers: list[bool]) -> Iterator[HostService]:
    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(len(sys.argv))", *arguments])

    service = HostService(KEY, 0, start, lambda: REPORT, answers.pop)
    yield service
    service.close()


def wait_for_end(service: HostService) -> None:
    deadline = time.monotonic() + 20
    while not service.ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_daemons_arguments_are_taken_out_of_the_text_for_a_shell() -> None:
    host, arguments = parse_daemon_command(["algo-2", OPEN_MPI_5])
    assert host == "algo-2"
    assert arguments[:4] == ["--allow-run-as-root", "--prtemca", "ess", "env"]
    assert arguments[-2:] == ["prterun-vm@0.0;tcp://192.0.2.2:43207:64,24", "--tree-spawn"]
    assert parse_daemon_command(["-x", "algo-3", *OPEN_MPI_4.split(" ")]) == (
        "algo-3",
        ["-mca", "ess", "env", "-mca", "orte_node_regex", "algo-[1:1-2]@0(2)"],
    )


@pytest.mark.parametrize("text", ["rm -rf /", "/venv/bin/prted; rm -rf /", ""])
def test_no_other_program_is_started(text: str) -> None:
    with pytest.raises(ValueError, match="not its daemon"):
        parse_daemon_command(["algo-2", text])


def test_a_first_host_starts_daemons_asks_for_failures_and_ends(service: HostService) -> None:
    others = OtherHosts(["localhost"], KEY, service.port, 20)
    assert run_daemon_on("localhost", ["a", "b"], KEY, service.port) == 3
    assert others.report() == REPORT
    assert [others.give_notice(), others.give_notice()] == [False, True]
    assert not service.ended()
    others.end(5)
    wait_for_end(service)
    assert service.exit_code == 5


def test_a_first_host_that_goes_away_is_noticed(service: HostService) -> None:
    others = OtherHosts(["localhost"], KEY, service.port, 20)
    for connection in others._connections.values():
        connection.close()
    wait_for_end(service)
    assert service.exit_code is None


def test_a_host_that_does_not_answer_is_asked_no_more(
    service: HostService, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = OtherHosts(["localhost"], KEY, service.port, 20)
    monkeypatch.setattr("smp_lite.entrypoints.hosts.network._ANSWER_S", 0.1)
    monkeypatch.setattr(service, "_give_notice", lambda: time.sleep(1))
    assert others.give_notice()  # nobody is left who does not know
    assert others.report() == RankReport([], {})
    assert others.lost == {"localhost"}
    wait_for_end(service)


def test_a_stranger_is_not_heard_and_keeps_nobody_out(service: HostService) -> None:
    with socket.create_connection(("localhost", service.port)):  # and says nothing
        with pytest.raises(ConnectionError, match=r"answers on port .* with another key"):
            run_daemon_on("localhost", [], b"a guess", service.port)
        assert run_daemon_on("localhost", [], KEY, service.port) == 1
        assert not service.joined


def test_hosts_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"host\(s\) algo-7.invalid did not come within 0.1 s \(port 1\)"):
        OtherHosts(["algo-7.invalid"], KEY, 1, 0.1)


def test_hosts_of_another_job_are_told_from_absent_ones(service: HostService) -> None:
    with pytest.raises(TimeoutError, match="localhost answered, but with another key: all hosts need"):
        OtherHosts(["localhost"], b"another key", service.port, 0.1)


@pytest.mark.parametrize("message", [[], {"call": "dance"}, {"call": "daemon"}, {}, "text"])
def test_a_message_that_makes_no_sense_ends_the_connection_only(
    message: Any, service: HostService, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = connect("localhost", service.port, KEY)
    assert connection is not None
    with connection, pytest.raises(EOFError):
        connection.call(message, 20)
    assert "makes no sense" in capfd.readouterr().err
    assert run_daemon_on("localhost", [], KEY, service.port) == 1


def test_a_report_keeps_to_the_limit_of_a_message(
    service: HostService, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "begins" + "\0" * LONGEST_MESSAGE + "ends"
    failures = [FailureRecord(rank, 7, 3, text) for rank in (1, 2)]
    monkeypatch.setattr(service, "_report", lambda: RankReport(failures, {}))
    texts = [failure.text for failure in OtherHosts(["localhost"], KEY, service.port, 20).report().failures]
    assert [text.startswith("begins") and text.endswith("ends") for text in texts] == [True, True]
    assert all("characters left out" in text and len(text) < LONGEST_MESSAGE for text in texts)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.6\r\n" * 10])
def test_something_else_that_listens_there_is_no_host(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_lite.entrypoints.hosts.connection._HANDSHAKE_S", 1)

    def speak(server: socket.socket) -> None:
        with suppress(OSError), server.accept()[0] as caller:
            caller.sendall(answer)
            caller.recv(10**6)
            time.sleep(2)

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=speak, args=(server,), daemon=True).start()
        with pytest.raises(TimeoutError, match="localhost did not come within 0 s") as raised:
            OtherHosts(["localhost"], KEY, server.getsockname()[1], 0)
    assert "another key" not in str(raised.value)


def test_silent_strangers_in_the_hosts_places_take_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smp_lite.entrypoints.hosts.connection._HANDSHAKE_S", 2)
    places = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server((places[0], 0)))
        port = first.getsockname()[1]
        for place in places[1:]:
            stack.enter_context(socket.create_server((place, port)))
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=f"{', '.join(places)} did not come within 0 s"):
            OtherHosts(places, KEY, port, 0)
        assert time.monotonic() < started + 4


def test_the_port_is_free_afterwards(service: HostService) -> None:
    service.close()
    again = HostService(KEY, service.port, lambda _: pytest.fail("not called"), lambda: REPORT, lambda: True)
    again.close()
