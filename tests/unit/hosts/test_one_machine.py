"""How the hosts of a job on one machine find one another, or learn why they will not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_lite.entrypoints.hosts.one_machine import Host, MeetingPlace

HOSTS = ("algo-1", "algo-2")


def host(name: str, pid: int | None = None) -> Host:
    return Host(name, {"NAME": name}, "/", os.getpid() if pid is None else pid)


@pytest.fixture
def meeting(tmp_path: Path) -> MeetingPlace:
    return MeetingPlace(tmp_path, HOSTS)


def test_hosts_come_in_the_jobs_order(meeting: MeetingPlace) -> None:
    for name in reversed(HOSTS):
        meeting.announce(host(name))
    assert [found.name for found in meeting.wait_for_all(0)] == list(HOSTS)


def test_an_absent_host_is_named(meeting: MeetingPlace) -> None:
    meeting.announce(host("algo-1"))
    with pytest.raises(TimeoutError, match=r"host\(s\) algo-2 did not come within 0 s"):
        meeting.wait_for_all(0)


def test_a_host_that_cannot_come_is_not_waited_for(meeting: MeetingPlace) -> None:
    meeting.announce(host("algo-1"))
    meeting.announce_failure("algo-2", "no script")
    with pytest.raises(ValueError, match="host algo-2 could not start: no script"):
        meeting.wait_for_all(600)


def test_a_first_host_that_cannot_come_is_not_waited_for(meeting: MeetingPlace) -> None:
    meeting.announce_failure("algo-1", "no script")
    with pytest.raises(ValueError, match="host algo-1 could not start: no script"):
        meeting.wait_for_outcome(600)


def test_a_first_host_that_ended_without_outcome_is_noticed(meeting: MeetingPlace) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    meeting.announce(host("algo-1", ended.pid))
    with pytest.raises(TimeoutError, match="host algo-1 ended and left no outcome"):
        meeting.wait_for_outcome(600)


def test_the_outcome_is_that_of_the_first_host(meeting: MeetingPlace) -> None:
    meeting.announce_outcome(7)
    assert meeting.wait_for_outcome(0) == 7
