"""Collectives on objects in trees, over MPI: small groups, in which each has few children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.comm.tree import place
from tests.harness import run_distributed, run_script
from tests.launch.api.test_api_failures import HANG_S, fails, write
from tests.launch.launching import left_behind
from tests.launch.processes.tree_cases import LARGE


def parameters(size: int) -> dict[str, Any]:
    return {"partitions": 2, "microbatches": 2, "ddp": size > 2}


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.thorough), 8])
def test_each_collective_gives_what_it_gives_without_trees(size: int) -> None:
    found = run_distributed("tests.launch.processes.tree_cases:trees", size, parameters=parameters(size))
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
        "tests.launch.processes.tree_cases:missing",
        size,
        kwargs={"absent": absent},
        parameters=parameters(size),
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


IN_A_TREE = """
from pathlib import Path
import signal

folder, size = Path(sys.argv[1]), 10
smp.init({"partitions": 2, "ddp": True})
world = smp.state.world
world.barrier()
world.calls.radix = 2
world.barrier()

class Raises:
    def __reduce__(self):
        raise OSError("it cannot be read")

class Kills:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

def call(payload):
    try:
        told = world.exchange(payload, "WORLD", "the call")
    except (OSError, smp.SMPError) as error:
        told = f"{type(error).__name__}: {error}"
    return f"{told}\\n"

told = ""
for turn, payload in enumerate([Raises(), rank, Kills()]):
    smp.set_watchdog(60 if turn == 1 else 3 if rank == 4 else 30)
    told += call(payload if rank == 3 else rank)
    (folder / f"turn{turn}-rank{rank}").touch()
    while turn == 0 and len(list(folder.glob("turn0-*"))) < size:
        time.sleep(0.01)
(folder / f"told{rank}").write_text(told)
os._exit(0)
"""


@pytest.mark.slow
def test_a_member_inside_a_tree_that_raises_or_is_killed_in_a_call_is_named_on_all_others(
    tmp_path: Path,
) -> None:
    """mpirun would end the others of a killed rank; it is told not to, so their waits must."""
    here = place(10, 3, radix=2)
    assert here.parent is not None and here.children
    script = write(tmp_path, IN_A_TREE)
    run_script([str(script), str(tmp_path)], 10, options=["--enable-recovery"], timeout_s=2 * HANG_S)
    assert left_behind(script) == []
    assert sorted(path.name for path in tmp_path.glob("told*")) == [f"told{i}" for i in range(10) if i != 3]
    for path in tmp_path.glob("told*"):
        raised, again, killed = path.read_text().splitlines()
        assert again == str(list(range(10)))
        for error in (raised, killed):
            assert error.startswith("SMPTimeout: ")
            assert "waited 3 s: the call is collective over the WORLD group" in error
            assert "but rank(s) 3 did not call it" in error
            assert path.name == "told4" or "rank 4 waited 3 s" in error
