"""Collectives on objects in trees, over MPI: small groups, in which each has few children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed
from tests.launch.test_api_failures import fails
from tests.launch.tree_cases import LARGE


def parameters(size: int) -> dict[str, Any]:
    return {"partitions": 2, "microbatches": 2, "ddp": size > 2}


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.thorough), 8])
def test_each_collective_gives_what_it_gives_without_trees(size: int) -> None:
    found = run_distributed("tests.launch.tree_cases:trees", size, parameters=parameters(size))
    ranks = list(range(size))
    for rank, (*turns, small, some_large, of_last, large, error, after) in enumerate(found):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        groups = [ranks, pair, ranks[rank % 2 :: 2], ranks]
        assert turns == [[(turn, i) for i in group] for turn in range(20) for group in groups]
        assert small == (ranks if rank == 0 else None)
        wanted = [bytes([i]) * (LARGE if i % 2 else 1) for i in ranks]
        assert some_large == (wanted if rank == 0 else None)
        assert of_last == [None] * (size - 1) + ["said"]
        assert large == after == ranks
        other = "another called right" if rank == 1 else "rank 1 called left"
        assert error.startswith("SMPMismatch: ") and f"but {other} over its WORLD group" in error


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("absent", [0, 3])
def test_whoever_waits_hears_who_is_missing_when_the_first_gives_up(size: int, absent: int) -> None:
    found = run_distributed(
        "tests.launch.tree_cases:missing", size, kwargs={"absent": absent}, parameters=parameters(size)
    )
    for rank, error in enumerate(found):
        if rank != absent:
            assert error.startswith("SMPTimeout: ")
            assert "waited 1 s: the call is collective over the WORLD group" in error
            assert f"but rank(s) {absent} did not call it" in error


@pytest.mark.slow
def test_a_member_of_a_tree_that_leaves_early_is_named(tmp_path: Path) -> None:
    body = """
smp.init({"partitions": 4})
world = smp.state.world
world.barrier()
world.calls.radix = 2
world.barrier()
if rank == 3:
    sys.exit(0)
world.exchange(None, "WORLD", "the call")
"""
    shown = fails(tmp_path, body, ranks=4)
    assert "rank(s) 3 ended the script early: the call is collective" in shown[-1]
    assert "but rank(s) 3 did not call it" in shown[-1]
