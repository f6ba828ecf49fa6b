"""Collectives on objects over up to 1,024 simulated ranks: results, numbers of messages, and named errors."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import deque

import pytest

from smp_lite.comm.transports.transport import Tag
from smp_lite.comm.tree import RADIX, nearby, place, subtree
from smp_lite.errors import SMPError, SMPMismatch, SMPTimeout
from tests.unit.hosts.roll_call_network import Network

SIZES = (1, 2, 7, RADIX, RADIX + 1, 16, 73, 1024)


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_holds_each_member_once(size: int) -> None:
    for index in range(size):
        here = place(size, index)
        for child in here.children:
            assert place(size, child).parent == index
        assert len(here.neighbours) <= 2 * RADIX - 1
    tops = range(min(size, RADIX))
    assert sorted(itertools.chain(*(subtree(size, top) for top in tops))) == list(range(size))


@pytest.mark.parametrize("size", [2, 32, 33, 1000, 1024])
def test_word_of_a_departure_gets_round_though_most_have_departed(size: int) -> None:
    rng = random.Random(size)
    present = {0, *rng.sample(range(size), max(1, size // 2))}
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {j for i in fresh for j in nearby(size, i) if j in present} - reached
        reached |= fresh
    assert reached == present
    assert max(len(nearby(size, i)) for i in range(size)) <= max(31, 2 * math.log2(size))


@pytest.mark.ci
@pytest.mark.parametrize("size", SIZES)
def test_all_get_all_payloads(size: int) -> None:
    network = Network(size)
    calls = {rank.rank: rank.begin({"rank": rank.rank}) for rank in network.ranks}
    found = network.run(calls)
    assert found == {rank: [{"rank": i} for i in range(size)] for rank in range(size)}
    if size <= RADIX:
        assert sum(network.sent.values()) == size * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_holds_until_the_last_has_come(size: int) -> None:
    network = Network(size)
    late = size // 3
    calls = {rank.rank: rank.begin() for rank in network.ranks if rank.rank != late}
    assert network.run(calls) == {}
    calls[late] = network.ranks[late].begin()
    assert network.run(calls) == {rank: [None] * size for rank in range(size)}


def test_1024_ranks_send_about_two_messages_each_and_none_many() -> None:
    network = Network(1024)
    network.run({rank.rank: rank.begin() for rank in network.ranks})
    assert sum(network.sent.values()) == 2 * (1024 - RADIX) + RADIX * (RADIX - 1)
    assert max(network.sent.values()) == 2 * RADIX - 1
    assert sum(network.noted.values()) == 0
    # A barrier is as short as it would be among few.
    assert max(network.bytes_from.values()) < 250 * (2 * RADIX - 1)


def test_what_one_says_travels_once_to_each_and_what_is_for_the_first_goes_up_only() -> None:
    said = b"x" * 10_000
    network = Network(1024)
    found = network.run({rank.rank: rank.begin(said if rank.rank == 700 else None) for rank in network.ranks})
    assert all(result[700] == said and result.count(None) == 1023 for result in found.values())
    assert sum(network.bytes_from.values()) < 1024 * (len(said) + 1000)

    network = Network(1024)
    found = network.run({rank.rank: rank.begin(rank.rank, to_first=True) for rank in network.ranks})
    assert found[0] == list(range(1024))
    depth = 4
    assert sum(network.bytes_from.values()) < 1024 * (2 * 250 + 20 * depth)


def test_calls_over_different_groups_do_not_mix() -> None:
    size = 128
    rows = [tuple(range(i, i + 16)) for i in range(0, size, 16)]
    columns = [tuple(range(i, size, 16)) for i in range(16)]
    network = Network(size, {"ROW": rows, "COLUMN": columns})
    order = [kind for _ in range(5) for kind in ("WORLD", "ROW", "COLUMN")]
    rng = random.Random(0)
    at = dict.fromkeys(range(size), 0)
    calls = {rank.rank: rank.begin((0, rank.rank), order[0]) for rank in network.ranks}
    found: dict[int, list[object]] = {rank: [] for rank in range(size)}
    while calls:
        network.now += 0.06
        # Ranks go on at speeds of their own.
        for rank in rng.sample(sorted(calls), max(1, len(calls) // 3)):
            if calls[rank].poll(network.now):
                found[rank].append(calls[rank].result())
                at[rank] += 1
                if at[rank] == len(order):
                    del calls[rank]
                else:
                    calls[rank] = network.ranks[rank].begin((at[rank], rank), order[at[rank]])
    for rank in range(size):
        groups = [network.group_of[kind][rank] for kind in order]
        assert found[rank] == [[(i, member) for member in group] for i, group in enumerate(groups)]


@pytest.mark.parametrize("size", [2, 4, RADIX + 1, 73])
def test_a_waiting_call_drives_its_own_messages(size: int) -> None:
    network = Network(size, as_a_store=True)
    # Each box holds a word of an earlier call that nobody has taken yet.
    word = pickle.dumps(("WORLD", 0, "earlier", {}, None))
    for source, dest in itertools.permutations(range(size), 2):
        network.boxes[source, dest, Tag.ROLL_CALL] = deque([word])
    calls = {rank.rank: rank.begin(rank.rank) for rank in network.ranks}
    network.is_slow = True  # so all send before anyone takes
    assert network.run(calls, 1) == {}
    network.is_slow = False
    assert network.run(calls) == {rank: list(range(size)) for rank in range(size)}


@pytest.mark.parametrize("size", [2, 4, RADIX + 1, 73])
def test_messages_of_a_call_that_failed_leave_while_the_next_one_waits(size: int) -> None:
    network = Network(size, as_a_store=True)
    calls = {rank.rank: rank.begin(what="left" if rank.rank == 0 else "right") for rank in network.ranks}
    others = {rank: call for rank, call in calls.items() if rank}
    assert network.run(others, 1) == {}
    # What rank 0 says stays with it: each box holds a word of an earlier call that nobody has taken yet.
    word = pickle.dumps(("WORLD", 0, "earlier", {}, None))
    for dest in others:
        network.boxes[0, dest, Tag.ROLL_CALL] = deque([word])
    assert isinstance(network.run({0: calls[0]}, 1)[0], SMPMismatch)
    after = network.ranks[0].begin(what="after")
    assert network.run({0: after}, 1) == {}
    found = network.run({0: after, **others})
    assert found.keys() == others.keys()
    assert all("rank 0 called left" in str(error) for error in found.values())
    again = {rank: network.ranks[rank].begin(what="after") for rank in others}
    assert network.run({0: after, **again}) == {rank: [None] * size for rank in range(size)}


# Something goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, RADIX, 1024])
@pytest.mark.parametrize("place_of_it", [0, 1, 0.1, 0.99])
def test_another_call_is_named_on_all_members(size: int, place_of_it: float) -> None:
    other = int(size * place_of_it) if place_of_it < 1 else 1
    network = Network(size)
    calls = {
        rank.rank: rank.begin(what="allgather" if rank.rank == other else "barrier") for rank in network.ranks
    }
    found = network.run(calls)
    assert len(found) == size
    for rank, error in found.items():
        assert isinstance(error, SMPMismatch)
        text = f"rank {rank} called {'allgather' if rank == other else 'barrier'} over WORLD group"
        assert str(error).startswith(text)
        if rank != other:
            assert f"but rank {other} called allgather over its WORLD group" in str(error)
    # All are in step after it.
    again = network.run({rank.rank: rank.begin(rank.rank) for rank in network.ranks})
    assert again == {rank: list(range(size)) for rank in range(size)}


@pytest.mark.parametrize("size", [4, 64, 1024])
def test_a_call_over_another_group_is_named(size: int) -> None:
    rows = [(i, i + 1) for i in range(0, size, 2)]
    network = Network(size, {"MP": rows})
    other = size // 2 + 1
    calls = {
        rank.rank: rank.begin(kind="MP" if rank.rank == other else "WORLD", what="x")
        for rank in network.ranks
    }
    found = network.run(calls)
    assert len(found) == size
    for rank, error in found.items():
        assert isinstance(error, SMPMismatch), (rank, error)
        assert rank == other or f"rank {other} called x over its MP group" in str(error)


@pytest.mark.parametrize("size", [2, RADIX, RADIX + 1, 64, 1024])
@pytest.mark.parametrize("which", ["first", "last", "some", "tops"])
def test_all_missing_ranks_are_named_on_all_that_wait(size: int, which: str) -> None:
    rng = random.Random(size)
    absent = {
        "first": {0},
        "last": {size - 1},
        "some": set(rng.sample(range(size), size // 2)),
        "tops": set(range(min(size - 1, RADIX))),
    }[which]
    network = Network(size)
    calls = {rank.rank: rank.begin(what="save") for rank in network.ranks if rank.rank not in absent}
    assert network.run(calls) == {}
    # The limits of most pass long after the first's.
    first = min(calls) if size > RADIX else None
    found = network.end_waits(calls, calls if first is None else {first})
    names = ", ".join(map(str, sorted(absent)))
    assert len(found) == len(calls)
    for rank, error in found.items():
        assert f"but rank(s) {names} did not call it" in str(error)
        assert rank == first or size <= RADIX or isinstance(error, SMPTimeout)
    if size > RADIX:
        assert sum(network.noted.values()) <= 3 * size  # asked, answered, told


def test_limits_that_pass_at_once_do_not_make_everybody_ask_everybody() -> None:
    network = Network(1024)
    calls = {rank.rank: rank.begin() for rank in network.ranks if rank.rank not in (0, 500)}
    assert network.run(calls) == {}
    found = network.end_waits(calls, calls)
    assert len(found) == 1022
    assert all("but rank(s) 0, 500 did not call it" in str(error) for error in found.values())
    assert sum(network.noted.values()) <= 3 * 1024


def test_who_waits_in_another_call_is_named_with_it() -> None:
    network = Network(64, {"PAIR": [(i, i + 32) for i in range(32)]})
    calls = {rank.rank: rank.begin() for rank in network.ranks if rank.rank not in (9, 41)}
    # It has been in this call before, so its word of the other one is no word of an order.
    network.ranks[9].calls.begun["WORLD"] = 1
    there = network.ranks[9].begin(kind="PAIR", what="load")
    assert network.run({**calls, 9: there}) == {}
    found = network.end_waits({**calls, 9: there}, {3})
    assert "rank(s) 9, 41 did not call it; rank 9 is in load over its PAIR group" in str(found[3])


def test_who_has_ended_after_this_call_is_not_missing_and_who_has_before_is() -> None:
    network = Network(64)
    network.run({rank.rank: rank.begin() for rank in network.ranks})
    calls = {rank.rank: rank.begin() for rank in network.ranks}
    slow = {5, *subtree(64, 5)}
    found = network.run({rank: call for rank, call in calls.items() if rank not in slow - {5}}, 5)
    assert found == {}
    found = network.run({rank: calls[rank] for rank in sorted(calls, reverse=True)}, 1)
    found = network.run({rank: call for rank, call in calls.items() if rank not in slow - {5}})
    assert 20 in found
    network.leave(20)
    waiting = max(slow)
    assert 20 not in calls[waiting].awaited()
    assert network.run({rank: calls[rank] for rank in slow - {5}}).keys() == slow - {5}

    network.leave(21)
    calls = {rank: network.ranks[rank].begin(what="save") for rank in range(64) if rank not in (20, 21)}
    assert network.run(calls) == {}
    assert {20, 21} <= calls[0].awaited()
    found = network.end_waits(calls, {0})
    assert all("rank(s) 20, 21 did not call it" in str(error) for error in found.values())
    told = str(found[1])
    assert isinstance(found[1], SMPError) and told.startswith("rank(s) 20, 21 ended the script early: save")


@pytest.mark.parametrize("size", [4, 64])
def test_a_call_that_some_gave_up_can_be_made_again(size: int) -> None:
    network = Network(size)
    calls = {rank.rank: rank.begin(1) for rank in network.ranks[1:]}
    assert network.run(calls) == {}
    network.end_waits(calls, calls)
    assert network.run({rank.rank: rank.begin(2) for rank in network.ranks}).keys() == set(range(size))
    third = network.run({rank.rank: rank.begin(3) for rank in network.ranks})
    assert third == {rank: [3] * size for rank in range(size)}
