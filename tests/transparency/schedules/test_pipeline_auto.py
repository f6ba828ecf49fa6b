"""``pipeline: auto`` changes no number, whatever it takes, and all ranks take the same: over MPI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.transparency.schedules.pipeline_auto import Told

RANKS = "tests.transparency.schedules.pipeline_auto"
CHOICE = "pipeline auto, by simulation of times of the modules, as measured on rank 0:"
AFTERWARDS = "pipeline auto, by simulation of what the first steps have taken:"
ALONE = "is within the bound: it stays"
ENOUGH = {"memory_limit": "1 GiB"}  # everything fits, so that there is a second choice


def run(function: str, num_ranks: int = 2, **kwargs: Any) -> list[Told]:
    found = [Told(*told) for told in run_distributed(f"{RANKS}:{function}", num_ranks, kwargs=kwargs)]
    assert [told.wrong for told in found] == [[]] * num_ranks
    # What one rank takes all take; rank 0 alone says so.
    assert len({(told.digest, told.visits, told.pipeline) for told in found}) == 1
    assert all("pipeline auto" not in told.printed for told in found[1:])
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["tied", "plain", "dropout around blocks", "dropout in blocks"])
def test_two_ranks(name: str) -> None:
    first = run("train", name=name, parameters={})[0]
    assert first.printed.count(CHOICE) == 1
    # What else is within the bound depends on what was measured.
    assert (AFTERWARDS in first.printed) != (ALONE in first.printed)


@pytest.mark.parametrize(
    ("parameters", "visits"),
    [({"virtual_stages": "v"}, (0, 1, 0)), ({"virtual_stages": 2}, (0, 1, 0, 1))],
)
def test_pieces_that_are_given_stay(parameters: dict[str, Any], visits: tuple[int, ...]) -> None:
    first = run("train", name="plain", parameters={**parameters, **ENOUGH})[0]
    assert first.visits == visits
    chosen, _, later = first.printed.partition(AFTERWARDS)
    split = "zero_bubble_v" if parameters["virtual_stages"] == "v" else "interleaved_virtual"
    assert f"{split}, as given" in chosen and f"\n{split} " in later
    assert "1 piece" not in chosen


@pytest.mark.ci
def test_replicas() -> None:
    found = run("replicas", 4, parameters=ENOUGH)
    assert found[0].printed.count(CHOICE) == found[0].printed.count(AFTERWARDS) == 1


STEPS = [
    "train",
    "evaluate",
    "train",
    "fail",
    "train",
    "evaluate",
    *["train"] * 7,
    "fail",
    "train",
]


def test_evaluation_and_failing_steps_between() -> None:
    first = run("events", kinds=STEPS, parameters=ENOUGH)[0]
    assert first.printed.count(AFTERWARDS) == 1


def test_steps_that_are_not_alike() -> None:
    kinds = ["train", "train", "train", "short", *["train"] * 4, "short", "train"]
    first = run("events", kinds=kinds, parameters={"virtual_stages": 1, **ENOUGH})[0]
    assert "pipeline auto: interleaved, without a choice: steps are not alike" in first.printed
    assert first.pipeline == "interleaved"


def test_a_model_that_cannot_be_traced() -> None:
    first = run("events", kinds=["train"] * 9, parameters=ENOUGH, model_name="queued")[0]
    assert "pipeline auto, one piece for each partition, since the model cannot be traced: " in first.printed
    assert first.visits == (0, 1)
    assert first.printed.count(AFTERWARDS) == 1


def test_skip_tracing() -> None:
    parameters = {"skip_tracing": True, **ENOUGH}
    first = run("events", kinds=["train"], parameters=parameters)[0]
    assert (
        "one piece for each partition, since skip_tracing is set; by numbers of parameters" in first.printed
    )
    assert "activations are not counted, since skip_tracing is set" in first.printed


@pytest.mark.parametrize("pipeline", ["auto", "interleaved", "zero_bubble_v"])
def test_a_limit_that_is_too_small_is_an_error_on_every_rank(pipeline: str) -> None:
    parameters = {"memory_limit": "64 KiB", "pipeline": pipeline}
    found = run_distributed(f"{RANKS}:events", 2, kwargs={"kinds": ["train"], "parameters": parameters})
    for error in (Told(*told).error for told in found):
        assert f"memory_limit=65536 (64.0 KiB) is less than pipeline='{pipeline}' needs on a rank" in error
        assert "would do. Raise it" in error and "64.0 KiB allowed" in error
        assert ("2 pieces, v" in error) == (pipeline == "auto")


@pytest.mark.ci
def test_a_limit_leaves_what_fits() -> None:
    first = run("events", kinds=["train"] * 10, parameters=ENOUGH)[0]
    chosen, _, later = first.printed.partition(AFTERWARDS)
    assert later and "allowed" not in chosen
    assert "KiB" in later and "microbatches" not in later  # bytes count there as well
    run("events", kinds=["train"] * 2, parameters={**ENOUGH, "pipeline": "simple"})
