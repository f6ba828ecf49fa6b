"""Hooks whose gradients depend on other parts of a backward: as in one process, or a named error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.harness import run_distributed
from tests.transparency.users_code.hooks import ALLOWED, READS, SHARES

CUT = {"blocks.2.down": 1, "blocks.3": 1, "blocks.4": 1, "blocks.5": 1}
"""The third block lies on both stages."""
SIDE_BY_SIDE = {"blocks.3": 1, "blocks.4": 1, "blocks.5": 1}
VISITED_AGAIN = {"blocks.2.up": 1}
"""The third block begins and ends on the first stage."""

SHARED = "used by such code that changes gradients of "
READ = r"is read or set at .*hooks\.py:\d+, in code that runs within a backward on stage .*: that parameter "


def outcomes(
    names: Iterable[str], places: dict[str, int] | None, pipeline: str, **parameters: Any
) -> dict[str, str]:
    """The same on both ranks, but for who failed."""
    kwargs = {"names": list(names), "places": places, "parameters": {"pipeline": pipeline, **parameters}}
    one, other = run_distributed("tests.transparency.users_code.hooks:outcomes", 2, kwargs=kwargs)
    assert one == other
    return one


def assert_refused(found: dict[str, str], pattern: str) -> None:
    assert {name: text for name, text in found.items() if not re.search(f"error: .*{pattern}", text)} == {}


def assert_equal(found: dict[str, str]) -> None:
    assert set(found.values()) == {"equal"}, found


PIPELINES = [
    pytest.param("zero_bubble", id="zero_bubble"),
    pytest.param("interleaved", id="interleaved", marks=pytest.mark.thorough),
]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_counts_of_two_stages_that_change_gradients(pipeline: str) -> None:
    assert_refused(outcomes(SHARES, CUT, pipeline), SHARED + "other stages")


@pytest.mark.ci
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_gradients_of_another_stage(pipeline: str) -> None:
    assert_refused(outcomes(READS, CUT, pipeline), READ + "belongs to stage")


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_hooks_that_know_of_their_own_stage(pipeline: str) -> None:
    assert_equal(outcomes(["counts_at_both_ends", *READS, *ALLOWED], SIDE_BY_SIDE, pipeline))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_is_nobodys_business(pipeline: str) -> None:
    assert_equal(outcomes(ALLOWED, CUT, pipeline))


INSIDE = ("a_parameter_reads", "a_module_reads", "a_value_reads", "a_later_layer_reads")


@pytest.mark.slow
def test_a_stage_that_is_visited_again() -> None:
    """Other microbatches come in between."""
    found = outcomes(["counts_at_both_ends", *INSIDE, *ALLOWED], VISITED_AGAIN, "zero_bubble")
    assert_equal({name: found.pop(name) for name in ALLOWED})
    assert_refused(
        {"counts": found.pop("counts_at_both_ends")}, SHARED + "another part of the model on that stage"
    )
    assert_refused(found, READ + "is used in another part of the model on that stage")


@pytest.mark.slow
def test_a_stage_that_is_visited_again_with_one_microbatch() -> None:
    """The order is that of one process."""
    assert_equal(outcomes(["counts_at_both_ends", *INSIDE], VISITED_AGAIN, "zero_bubble", microbatches=1))


@pytest.mark.slow
@pytest.mark.parametrize(("virtual", "pipeline"), [(2, "interleaved_virtual"), ("v", "zero_bubble_v")])
def test_virtual_stages(virtual: Any, pipeline: str) -> None:
    found = outcomes(["counts_in_a_default", *ALLOWED], None, pipeline, virtual_stages=virtual)
    assert_refused({"counts": found.pop("counts_in_a_default")}, SHARED)
    assert_equal(found)
