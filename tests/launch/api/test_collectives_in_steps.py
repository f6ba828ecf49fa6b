"""What collectives between replicas write inside a step: torch says neither that they do, nor to what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed

OWN = "tests.launch.api.collective_cases"
WRITTEN: dict[str, list[list[float]]] = {
    "all_reduce": [[3, 3], [3, 3]],
    "all_gather": [[1, 1, 2, 2], [1, 1, 2, 2]],
    "all_gather_into_tensor": [[1, 1, 2, 2], [1, 1, 2, 2]],
    "all_to_all_single": [[1, 2], [1, 2]],
    "broadcast": [[2, 2], [2, 2]],
    "reduce": [[3, 3], [2, 2]],
    "gather": [[1, 1, 2, 2], [2, 2]],
}
"""By collective, what each of two replicas has of ``[1, 1]`` and ``[2, 2]``."""


def run(function: str, num_ranks: int, **kwargs: Any) -> list[Any]:
    return run_distributed(f"{OWN}:{function}", num_ranks, kwargs=kwargs, timeout_s=100.0)


def in_both_steps(*values: list[float]) -> list[list[list[list[float]]]]:
    """The values, each the same in two microbatches."""
    return [[[value, value] for value in values]] * 2


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_after_it(name: str) -> None:
    for rank, found in enumerate(run("written", 2, name=name)):
        if isinstance(found, str):  # torch before 2.13 calls these without asking its arguments
            assert name in ("broadcast", "reduce", "gather") and torch.__version__ < "2.13"
            assert f"torch.distributed's {name}() inside an smp.step, on a value that lives" in found
        else:
            assert found == in_both_steps(WRITTEN[name][rank])


@pytest.mark.parametrize("by", ["read_before", "into_own_argument"])
def test_what_another_stage_has_read_before_stays_as_it_was(by: str) -> None:
    for rank, found in enumerate(run(by, 4)):
        assert found == in_both_steps([rank // 2 + 1] * 2, [3, 3])


def test_a_coalescing_manager_is_refused() -> None:
    for said, after in run("coalesced", 2):
        assert "all_reduce() inside an smp.step on a value of stage 0, in a coalescing manager" in said
        assert after == 2
