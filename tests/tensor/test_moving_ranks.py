"""How much ranks read and write of a portable checkpoint, and what becomes of it when one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed, run_script
from tests.launch.saving.test_killed_saves import check
from tests.tensor.moving_layouts import Layout, train_dense

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.moving_cases:"
REPOSITORY = Path(__file__).parents[2]
ONE, STAGES, SPLIT, REPLICAS, BOTH = (
    Layout(*sizes) for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1))
)


def call(name: str, layout: Layout, **kwargs: Any) -> list[Any]:
    return run_distributed(
        CASES + name, layout.world_size, kwargs={"parameters": layout.parameters, **kwargs}
    )


@pytest.mark.slow
def test_each_rank_reads_its_pieces_and_writes_them_once(tmp_path: Path) -> None:
    total = 0
    for source in (REPLICAS, SPLIT):
        call("save_large", source, folder=str(tmp_path), tag=str(source))
        sizes = [path.stat().st_size for path in (tmp_path / f"{source}_portable").glob("*.distcp")]
        assert len(sizes) == 2
        assert min(sizes) > 0.4 * sum(sizes)  # the work is shared, by replicas too
        total = total or sum(sizes)
        assert sum(sizes) == pytest.approx(total, rel=0.1)  # once, in each layout
    for source in (REPLICAS, SPLIT):
        for target, steps_before in ((STAGES, 0), (SPLIT, 1)):
            found = call(
                "load_large", target, folder=str(tmp_path), tag=str(source), steps_before=steps_before
            )
            assert sum(rank["held"] for rank in found) < 1.05 * total  # these tensors are the most of it
            for rank in found:
                assert rank["held"] <= rank["read"] < rank["held"] + 10_000 * rank["entries"]
                assert rank["read"] < 0.6 * total


@pytest.mark.parametrize(
    ("target", "steps_before"),
    [(STAGES, 0), (SPLIT, 1), pytest.param(BOTH, 0, marks=pytest.mark.thorough)],
    ids=str,
)
def test_what_one_rank_cannot_read_no_rank_loads(target: Layout, steps_before: int, tmp_path: Path) -> None:
    dense = train_dense(tmp_path)
    kwargs = {"folder": str(tmp_path), "tag": "listed", "steps_before": steps_before}
    found = call("unreadable", target, **kwargs)
    last = len(found) - 1
    for rank, answer in enumerate(found):
        cause = "the cause" if rank == last else f"failed on rank(s) {last}; rank {last} says: Arithmetic"
        said = answer["said"]
        if steps_before:
            assert cause in said[0]
        else:
            assert not said[0]
            assert cause in said[1]
            assert "could not be read by the first step" in said[2]
        assert answer["losses"] == pytest.approx(dense.losses[2:], rel=1e-6)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_full_disk_fails_on_all_ranks_and_leaves_the_save_before(rank: int, tmp_path: Path) -> None:
    for here, answer in enumerate(call("disk_full", SPLIT, folder=str(tmp_path), rank=rank)):
        wanted = "could not be written" if here == rank else f"failed on rank(s) {rank}"
        assert wanted in answer["said"]
        assert f"__{rank}_0.distcp" in answer["said"]
        assert answer["left"] == ["newest", "t_portable"]
        assert answer["content"] == "first"


def test_ranks_that_want_different_things_are_told(tmp_path: Path) -> None:
    for answers in call("disagree", STAGES, folder=str(tmp_path)):
        assert "portable is False on rank 1 and True on rank 0" in answers[0]
        assert "model and optimizer is ['model'] on rank 1" in answers[1]
        assert "(tag, partial) is (None, True) on rank 1 and ('t', True) on rank 0" in answers[2]


@pytest.mark.parametrize("layout", [SPLIT, pytest.param(BOTH, marks=pytest.mark.thorough)], ids=str)
def test_partial_and_full_checkpoints_hold_split_parameters_too(layout: Layout, tmp_path: Path) -> None:
    for gone_on, *resumed in call("other_kinds", layout, folder=str(tmp_path)):
        assert resumed == [gone_on] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one_in", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_kill_at_any_operation_on_files_leaves_a_whole_checkpoint(one_in: int, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.tensor.moving_killed", str(tmp_path), "every", str(one_in)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout.splitlines()[-1])
    assert len(outcomes) > 60 // one_in
    for outcome in outcomes:
        check(outcome, "partial")
        assert outcome["left"] == [], outcome
        assert {**outcome["later"], "None": outcome["found"]["None"]} == outcome["found"], outcome
    for done in range(3):  # kills came early and late enough for both outcomes
        newest = {
            outcome["found"]["t" if done < 2 else "u"] for outcome in outcomes if outcome["done"] == done
        }
        assert len(newest) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "operation", "wanted"),
    [
        (1, "half a file", 1),
        pytest.param(1, "__1_0.distcp", 1, marks=pytest.mark.thorough),
        pytest.param(0, ".metadata.tmp", 1, marks=pytest.mark.thorough),
        pytest.param(0, "t_portable.ready", 1, marks=pytest.mark.thorough),  # before the switch
        (0, "removing", 2),  # and after it
        pytest.param(0, "/newest", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint_to_another_layout(
    rank: int, operation: str, wanted: int, tmp_path: Path
) -> None:
    killed = run_script(["-m", "tests.tensor.moving_killed", str(tmp_path), str(rank), operation], 2)
    assert killed.returncode != 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    (found,) = zip(*call("load_each", SPLIT, folders=[(str(tmp_path), None)], steps_before=0), strict=True)
    dense = train_dense(tmp_path / "dense")
    for answer in found:
        assert answer["content"] == {"step": wanted}
        if wanted == 2:
            assert answer["losses"] == pytest.approx(dense.losses[2:], rel=1e-6)
