"""The memory that `smp-lite plan` shows is the memory that training takes, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.transparency.planned_peaks import JOBS, planned_memory

ALLOWED = 0.05


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore:Stage . .*is the largest")
@pytest.mark.parametrize(
    ("num_stages", "pipeline"),
    [
        (2, "interleaved"),
        (2, "zero_bubble"),
        pytest.param(2, "simple", marks=pytest.mark.thorough),
        pytest.param(4, "interleaved", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", sorted(JOBS))
def test_peak_of_each_stage(name: str, num_stages: int, pipeline: str) -> None:
    check(name, num_stages, {"partitions": num_stages, "microbatches": 4, "pipeline": pipeline})


@pytest.mark.slow
def test_peak_with_replicas() -> None:
    check("tied", 4, {"partitions": 2, "microbatches": 4, "ddp": True})


def check(name: str, num_ranks: int, parameters: dict[str, Any]) -> None:
    """A message leaves a little earlier or later in each step, so the nearer of two steps counts."""
    planned = planned_memory(name, parameters)
    assert [stage.not_counted for stage in planned] == [()] * parameters["partitions"]
    measured = run_distributed(
        "tests.transparency.planned_peaks:measured_peaks",
        num_ranks,
        kwargs={"name": name},
        parameters=parameters,
    )
    assert len(measured) == num_ranks
    errors = {
        f"rank {rank}, stage {stage}, {planned[stage].when}": min(
            abs(planned[stage].total / peak - 1) for peak in peaks
        )
        for rank, (stage, peaks) in enumerate(measured)
    }
    assert {what: error for what, error in errors.items() if error > ALLOWED} == {}
