"""Who is said to have failed first, and how it is put into one line."""

from __future__ import annotations

from smp_lite.entrypoints.mpi.mpirun import Death
from smp_lite.entrypoints.this_machine.ending import Ending, decide_ending
from smp_lite.errors_record import FailureRecord

EARLY = FailureRecord(
    rank=2,
    time_ns=1,
    exit_code=5,
    text="Traceback (most recent call last):\nValueError: x\n",
    headline="ValueError: x",
)
LATE = FailureRecord(rank=0, time_ns=2, exit_code=1, text="a peer has gone")


def test_the_earliest_record_is_the_cause() -> None:
    ending = decide_ending([EARLY, LATE], Death(0, exit_code=1), 1, {2: ["last", "words"]})
    assert (ending.exit_code, ending.rank, ending.others) == (5, 2, (LATE,))
    assert ending.last_lines == ("last", "words")
    assert ending.headline == "rank 2 failed first: ValueError: x"


def test_a_rank_killed_without_a_record_comes_before_the_records_of_its_loss() -> None:
    ending = decide_ending([LATE], Death(3, signal_number=9), 137, {})
    assert (ending.exit_code, ending.rank) == (137, 3)
    assert ending.headline == "rank 3 failed first: killed by signal 9 (SIGKILL)"


def test_a_rank_that_left_a_record_and_was_then_killed_is_judged_by_its_record() -> None:
    assert decide_ending([EARLY], Death(2, signal_number=9), 137, {}).exit_code == 5


def test_without_any_account_mpirun_itself_is_named() -> None:
    assert decide_ending([], None, -15, {}) == Ending(143, None, "mpirun ended with exit code 143")
    assert decide_ending([], None, 0, {}) == Ending(0)


def test_a_text_that_is_no_traceback_is_told_by_its_first_line() -> None:
    assert Ending(1, None, "cannot\nbecause").headline == "cannot"
    assert Ending(3).headline == "exit code 3"


def test_what_mpirun_says_of_itself_is_told() -> None:
    block = ["-----", "  No such policy: nonsense", "", "-----"]
    ending = decide_ending([], None, 213, {}, mpirun_lines=block)
    assert ending.headline == "mpirun ended with exit code 213: No such policy: nonsense"
    assert ending.last_lines == tuple(block)


def test_a_host_that_went_away_is_named() -> None:
    ending = decide_ending([], None, 1, {}, mpirun_lines=["lost a daemon"], lost_hosts=["algo-2"])
    assert ending.headline == "host(s) algo-2 went away"
    assert decide_ending([EARLY], None, 1, {}, lost_hosts=["algo-2"]).rank == 2


def test_a_rank_that_lost_its_peer_is_not_called_the_first() -> None:
    said = ["[algo-1:00000] *** An error occurred in Socket closed"]
    ending = decide_ending([], Death(1), 14, {}, mpirun_lines=said)
    assert (ending.exit_code, ending.rank) == (14, None)
    assert ending.headline.startswith("rank 1 lost its connection to a rank of another host")
    assert decide_ending([], Death(1), 14, {}).rank == 1
