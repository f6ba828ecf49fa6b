"""The memory that `smp-lite plan` shows is the memory that training takes, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest

from smp_lite.plan.step.actions import ActionKind
from smp_lite.preview import memory_preview
from smp_lite.preview.action_memory import Played, play
from tests.harness import run_distributed
from tests.transparency.schedules.planned_peaks import JOBS, planned_memory

ALLOWED = 0.05


@pytest.mark.host  # whose allocator is looked at; a GPU's: tests/gpu
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


@pytest.mark.host
@pytest.mark.slow
def test_peak_with_replicas() -> None:
    check("tied", 4, {"partitions": 2, "microbatches": 4, "ddp": True})


def check(name: str, num_ranks: int, parameters: dict[str, Any]) -> None:
    """A message leaves a little earlier or later in each step, so the nearer of two steps counts."""
    planned = planned_memory(name, parameters)
    assert [stage.not_counted for stage in planned] == [()] * parameters["partitions"]
    measured = run_distributed(
        "tests.transparency.schedules.planned_peaks:measured_peaks",
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


@pytest.mark.ci
@pytest.mark.parametrize("name", ["conv", "gpt"])
def test_nothing_of_a_microbatch_is_kept_once_its_parameters_have_their_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the step's result holds autograd's nodes: as much as without actions for gradients."""
    found: list[Played] = []

    def played(*args: Any, **options: Any) -> Played:
        found.append(play(*args, **options))
        return found[-1]

    monkeypatch.setattr(memory_preview, "play", played)
    left = []
    for pipeline in ("interleaved", "zero_bubble"):
        planned_memory(name, {"partitions": 2, "microbatches": 4, "pipeline": pipeline})
        left.append({0: 0, 1: 0})
        for (_, is_first, action), memory in found[-1].memory.items():
            if not is_first:
                left[-1][action.stage_index] += memory.kept
    assert any(action.kind is ActionKind.WEIGHT for _, _, action in found[1].memory)
    assert left[0] == left[1]
