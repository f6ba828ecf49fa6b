"""Who is said to be missing while MPI begins, by what is known on this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_lite.comm.transports import start_watch

HERE = "on this host (host)"


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 0 of 4 of a job whose other ranks have no processes."""
    variables = {"RANK": "0", "SIZE": "4", "LOCAL_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "none-of-this-machine@1")
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    return monkeypatch


def come(*ranks: int) -> None:
    for rank in ranks:
        start_watch._mark("begins", rank).touch()


def test_the_ranks_that_did_not_come_are_named(mpirun: pytest.MonkeyPatch) -> None:
    come(0, 2)
    said = start_watch._who_did_not_come()
    assert said.replace(" (has ended)", "") == "rank(s) 1, 3 of 4 did not come to smp.init"


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ((0,), f"of the 2 rank(s) {HERE} only 0 came to smp.init"),
        ((0, 1), f"of the 2 rank(s) {HERE} all came to smp.init, so a rank of another host did not, or MPI "),
    ],
)
def test_of_several_hosts_each_speaks_for_itself(
    came: tuple[int, ...], said: str, mpirun: pytest.MonkeyPatch
) -> None:
    mpirun.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    come(*came)
    assert start_watch._who_did_not_come().startswith(said)


def test_ranks_that_are_all_there_are_not_blamed(mpirun: pytest.MonkeyPatch) -> None:
    come(0, 1, 2, 3)
    assert start_watch._who_did_not_come() == "MPI could not connect the ranks, which are all there"


def test_another_launcher_tells_less(mpirun: pytest.MonkeyPatch) -> None:
    mpirun.delenv("PMIX_SERVER_TMPDIR")
    assert "which one, the launcher has not told us" in start_watch._who_did_not_come()


def test_a_rank_that_is_through_has_no_limit_any_more(mpirun: pytest.MonkeyPatch) -> None:
    with start_watch.watched_start(0, 300.0):
        assert start_watch._mark("begins", 0).exists()
    assert not start_watch._mark("begins", 0).exists()
