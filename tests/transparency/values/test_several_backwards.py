"""Several ``model.backward`` calls in one microbatch add to gradients one after another, as in autograd."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.values.several_backwards import STEPS


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "pipeline",
    ["interleaved", *[pytest.param(each, marks=pytest.mark.slow) for each in ("simple", "zero_bubble")]],
)
def test_gradients_are_those_of_one_process(name: str, pipeline: str) -> None:
    """To the bit, but where two backwards go through the same calls: those add before they go on."""
    tolerance = 1e-6 if name == "from_one_forward" else 0.0
    run_distributed(
        "tests.transparency.values.several_backwards:train",
        2,
        kwargs={"name": name, "tolerance": tolerance},
        parameters={"partitions": 2, "microbatches": NUM_MICROBATCHES, "pipeline": pipeline},
    )


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("two_forwards", "OwnParameter"),
        ("the_later_first", "OwnParameter"),
        ("one_for_all", "OwnParameter"),
        ("penalised", "OwnParameter"),
        ("two_forwards", "LooksWithin"),
        ("looked_at_between", "LooksWithin"),
    ],
)
def test_a_parameter_of_the_root_gets_one_gradient_after_the_other(name: str, model: str) -> None:
    run_distributed(
        "tests.transparency.values.several_backwards:train",
        2,
        kwargs={"name": name, "model": model},
        parameters={"partitions": 2, "microbatches": NUM_MICROBATCHES},
    )
