"""Whatever a kill leaves of a save resumes: the save before or the new one, whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed, run_script

pytestmark = pytest.mark.sampled(3)

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)  # 300 forks for all operations
@pytest.mark.parametrize(
    ("kind", "one_in"),
    [
        ("partial", 3),
        pytest.param("partial", 1, marks=pytest.mark.thorough),
        pytest.param("full", 1, marks=pytest.mark.thorough),
    ],
)
def test_a_kill_at_any_operation_on_files_leaves_a_whole_checkpoint(
    kind: str, one_in: int, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.launch.saving.killed_saves", str(tmp_path), kind, str(one_in)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout.splitlines()[-1])
    once, twice = outcomes["once"], outcomes["twice"]
    assert len(once) > 60 // one_in
    assert len(twice) > 40 // one_in
    for outcome in once:
        check(outcome, kind)
        assert outcome["left"] == [], outcome
        # The next save has finished what was ready, and taken nothing away.
        assert {**outcome["later"], "None": outcome["found"]["None"]} == outcome["found"], outcome
    for outcome in twice:
        check(outcome, kind)
    # The kills came early and late enough for both outcomes, and no kill lost what was switched to.
    for done in range(3):
        newest = [outcome["found"]["t" if done < 2 else "u"] for outcome in once if outcome["done"] == done]
        assert len(set(newest)) == 2
        assert newest == sorted(newest, key=lambda save: -1 if save is None else save)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rank", "operation", "wanted"),
    [
        pytest.param(1, "model_1.pt", 0, marks=pytest.mark.thorough),
        (1, "half a file", 0),
        pytest.param(0, "optimizer_0.pt", 0, marks=pytest.mark.thorough),
        (0, "t_partial.ready", 0),  # before the switch
        (0, "removing", 1),  # and after it
        pytest.param(0, "/newest", 1, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint_to_all(
    rank: int, operation: str, wanted: int, tmp_path: Path
) -> None:
    parameters = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}
    killed = run_script(
        ["-m", "tests.launch.saving.killed_ranks", str(tmp_path), str(rank), operation],
        2,
        env={"SM_HP_MP_PARAMETERS": json.dumps(parameters)},
    )
    assert killed.returncode != 0
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left
    found = run_distributed(
        "tests.launch.saving.killed_ranks:resumed", 2, kwargs={"folder": str(tmp_path)}, parameters=parameters
    )
    assert found == [(wanted, True)] * 2


def check(outcome: dict[str, Any], kind: str) -> None:
    """Saves 0 and 1 have the tag "t", 2 has "u"; `done` of them had returned when the kill came."""
    done, found = outcome["done"], outcome["found"]
    before = done - 1 if done else None
    assert found["None"] in (before, done), outcome
    if done < 2:
        assert found["t"] in (before, done), outcome
        assert found["u"] is None, outcome
    else:
        assert found["u"] in (None, 2), outcome
        retired = kind == "partial" and found["u"] == 2
        assert found["t"] == 1 or (retired and found["t"] is None), outcome
