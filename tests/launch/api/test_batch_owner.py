"""A step's batch is pp rank 0's where the other ranks bring dummies, as in AWS's data pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed

CASES = "tests.launch.api.api_batch_cases:"
TWO = {"partitions": 2, "microbatches": 2}


def check(found: list[Any], world_size: int) -> None:
    assert len(found) == world_size
    for rank in found:
        assert rank["losses"] == rank["plain losses"]
        assert rank["same"]
        assert rank["seen"] == [(2, 5), (2, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["positional", "keywords", "dict", "nested", "mapping", "other order"])
def test_dummies_of_other_ranks_are_replaced(shape: str) -> None:
    check(run_distributed(f"{CASES}trained", 2, kwargs={"shape": shape}, parameters=TWO), 2)


@pytest.mark.parametrize("dummies", ["later", "between", "like the data"])
def test_a_rank_may_bring_data_in_some_steps(dummies: str) -> None:
    check(run_distributed(f"{CASES}trained", 2, kwargs={"dummies": dummies}, parameters=TWO), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [{"partitions": 3}, {"static_mode": True}, {"skip_tracing": True, "pipeline": "simple"}],
    ids=["three", "static", "simple"],
)
def test_whatever_the_pipeline(parameters: dict[str, Any]) -> None:
    parameters = {**TWO, **parameters}
    check(
        run_distributed(f"{CASES}trained", parameters["partitions"], parameters=parameters),
        parameters["partitions"],
    )


@pytest.mark.slow
def test_each_replica_has_an_owner_of_its_own() -> None:
    check(run_distributed(f"{CASES}trained", 4, parameters={**TWO, "ddp": True}), 4)


def test_ranks_that_lie_apart_find_their_owner() -> None:
    parameters = {**TWO, "ddp": True, "placement_strategy": "spread"}
    check(run_distributed(f"{CASES}trained", 4, parameters=parameters), 4)


def test_evaluation_before_any_training() -> None:
    for found, expected in run_distributed(f"{CASES}evaluated", 2, parameters=TWO):
        assert found == expected


def test_a_dummy_on_the_owner_is_an_error_that_says_where_to_load() -> None:
    for text in run_distributed(f"{CASES}owner_has_the_dummy", 2, parameters=TWO):
        assert "that of rank 0 is empty: mask is float32[4, 0] there" in text
        assert "has shape [4, 5] on rank 1" in text
        assert "Load the data where smp.pp_rank() is 0" in text


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("sparse", "a tensor of layout torch.sparse_coo on cpu"),
        ("conjugate", "the conjugate of another tensor"),
    ],
)
def test_what_cannot_be_handed_over_is_an_error(kind: str, what: str) -> None:
    case = f"{CASES}what_cannot_be_handed_over"
    for text in run_distributed(case, 2, kwargs={"kind": kind}, parameters=TWO):
        assert f"pp rank 0 has {what} in its batch, and other ranks have dummies" in text


def test_another_nesting_is_an_error_that_names_the_argument() -> None:
    for text in run_distributed(f"{CASES}another_nesting", 2, parameters=TWO):
        assert "rank 1 has no place for it: the tensor mask is among the arguments on rank 0 only" in text


def test_other_numbers_of_the_same_shape_are_still_an_error() -> None:
    for text in run_distributed(f"{CASES}same_shape_other_numbers", 2, parameters=TWO):
        assert text.startswith("SMPMismatch: the batch of a step differs")


def test_other_numbers_are_seen_in_every_step() -> None:
    for text in run_distributed(f"{CASES}other_numbers_later", 2, parameters=TWO):
        assert text.startswith("SMPMismatch: the batch of a step differs: mask, float32[4, 5], has other")


@pytest.mark.parametrize("kind", ["array", "list", "number", "global"])
def test_other_values_of_a_ranks_own_are_an_error(kind: str) -> None:
    """Each stage would compute with its own rank's."""
    says = (
        "the recording of a step differs"
        if kind == "number"
        else "what a step reads beside its batch differs"
    )
    for text in run_distributed(f"{CASES}own_values", 2, kwargs={"kind": kind}, parameters=TWO):
        assert text.startswith(f"SMPMismatch: {says}")


def test_memory_that_is_not_written_yet_may_differ() -> None:
    found = run_distributed(f"{CASES}unwritten", 2, parameters=TWO)
    assert found[0] == found[1]


def test_a_batch_with_gaps_is_handed_over() -> None:
    for losses in run_distributed(f"{CASES}with_gaps", 2, parameters=TWO):
        assert losses[0] == losses[1]


@pytest.mark.parametrize("others", ["dummies", "copies"])
@pytest.mark.parametrize("kind", ["one tensor", "shifted", "numpy", "other types"])
def test_what_shares_memory_on_the_owner_shares_it_everywhere(kind: str, others: str) -> None:
    kwargs = {"kind": kind, "others": others}
    for losses, plain in run_distributed(f"{CASES}shares_memory", 2, kwargs=kwargs, parameters=TWO):
        assert losses == plain


def test_random_numbers_go_on_from_where_the_data_was_made() -> None:
    """pp rank 0 draws for its data; the step draws too, and dropout is seeded from where it is."""
    found = run_distributed(f"{CASES}draws_for_data", 2, parameters=TWO)
    assert found[0] == found[1]


def test_training_goes_on_after_such_an_error() -> None:
    for rank in run_distributed(f"{CASES}goes_on_after_an_error", 2, parameters=TWO):
        assert "is empty" in rank["error"]
        assert rank["same"]
