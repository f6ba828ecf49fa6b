"""Checkpoints on real ranks: 2 partitions, and 2 partitions with 2 replicas in both placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed

CASES = "tests.launch.api_checkpoint_cases:"
MANUAL = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}


def run(case: str, world_size: int, strategy: str = "cluster", **kwargs: Any) -> list[Any]:
    parameters = {**MANUAL, "placement_strategy": strategy, "ddp": world_size > 2}
    return run_distributed(f"{CASES}{case}", world_size, kwargs=kwargs, parameters=parameters)


@pytest.mark.parametrize(
    ("world_size", "strategy", "steps_before", "by_tag"),
    [
        (2, "cluster", 0, True),
        (2, "cluster", 1, False),
        (4, "cluster", 0, False),
        (4, "spread", 1, True),
    ],
)
def test_training_goes_on_from_a_partial_checkpoint_to_the_bit(
    tmp_path: Path, world_size: int, strategy: str, steps_before: int, by_tag: bool
) -> None:
    found = run(
        "resume",
        world_size,
        strategy,
        directory=str(tmp_path),
        steps_before=steps_before,
        by_tag=by_tag,
    )
    files = ["model_0.pt", "model_1.pt", "optimizer_0.pt", "optimizer_1.pt"]
    files += ["partition.json", "user_content.pt"]
    for seen in found:
        assert seen["content"] == {"step": 3}
        assert seen["losses"]
        assert seen["states"]
        assert seen["files"] == [f"three_partial/{file}" for file in files]


def test_a_full_checkpoint_is_a_plain_models_file_both_ways(tmp_path: Path) -> None:
    for seen in run("full_checkpoint", 4, directory=str(tmp_path)):
        assert seen == {"content": [1], "losses": True, "plain": True, "from plain": True}


def test_parts_saved_on_dp_rank_0_are_loaded_on_all_ranks(tmp_path: Path) -> None:
    for seen in run("save_and_load", 4, directory=str(tmp_path)):
        assert seen == {"mine": True, "equal": True, "files": ["part.pt_0", "part.pt_1"]}
