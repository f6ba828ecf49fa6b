"""Activation offloading on a (pretended) device, to the host's pinned memory: the same to the bit.

Copies there end when something waits for them. Whoever reads one before, changes or frees the memory that it
reads, or does not let it wait for what has been computed, gets nonsense or an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed

OWN = "tests.transparency.devices.offload_on_device"
INPUT = 8 * 64 * 4
"""Bytes of what a block is given for one microbatch."""


def run(ranks: int, parameters: dict[str, Any], function: str = "trained", **kwargs: Any) -> list[Any]:
    return run_distributed(f"{OWN}:{function}", ranks, devices=1, parameters=parameters, kwargs=kwargs)


def offloading(horizon: int) -> dict[str, Any]:
    return {"offload_activations": True, "activation_loading_horizon": horizon}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found["losses"] == expected["losses"] and all(
        torch.equal(value, expected["state"][name]) for name, value in found["state"].items()
    )


SHAPES: list[dict[str, Any]] = [
    {"partitions": 1, "pipeline": "simple"},
    {"partitions": 2, "pipeline": "simple", "static_mode": True},
    {"partitions": 2, "pipeline": "interleaved"},
    {"partitions": 3, "pipeline": "simple", "active_microbatches": 2},
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_bit(shape: dict[str, Any]) -> None:
    shape = {"microbatches": 4, **shape}
    (expected,) = run(1, {}, microbatches=4, in_memory=shape)
    left = []
    for horizon in (1, 2, 100):
        (found,) = run(1, {}, microbatches=4, in_memory={**shape, **offloading(horizon)})
        assert same(found, expected)
        left.append(found["left"])
    assert left[0] >= left[1] >= left[2] == 0  # what would be back at once stays
    assert left[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["ipc", "mpi"])
def test_on_ranks(wire: str) -> None:
    parameters = {"partitions": 2, "microbatches": 4, "pipeline": "simple"}
    expected = run(2, parameters, microbatches=4, wire=wire)
    found = run(2, {**parameters, **offloading(1)}, microbatches=4, wire=wire)
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours, theirs)
        assert ours["left"] > 0


def test_memory_is_given_back_and_no_host_waits() -> None:
    """Six microbatches are in flight: without offloading all their inputs are on the device, else three.

    Rows of the host's memory are used again: what a step needs, the first has made.
    """
    parameters = {"partitions": 1, "microbatches": 6, "pipeline": "simple"}
    (kept,) = run(1, {}, microbatches=6, in_memory=parameters)
    (found,) = run(1, {}, microbatches=6, in_memory={**parameters, **offloading(1)})
    assert same(found, kept)
    assert kept["peak"] - found["peak"] > 0.95 * 3 * 8 * INPUT
    assert found["waits"] == kept["waits"]
    steps = 3
    assert found["rows"] == [found["left"] / steps / INPUT]


@pytest.mark.ci
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_others_hold_stays(partitions: int) -> None:
    parameters = {"partitions": partitions, "microbatches": 4, "pipeline": "simple"}
    (expected,) = run(1, {}, microbatches=4, in_memory=parameters, held=True)
    (found,) = run(1, {}, microbatches=4, in_memory={**parameters, **offloading(1)}, held=True)
    assert same(found, expected)
    assert found["left"] > 0


def test_copies_of_one_row_follow_each_other_and_keep_both_ends() -> None:
    assert run(1, {}, "store_alone") == [[True, True, True]]


def test_layouts_come_back_as_they_were() -> None:
    assert run(1, {}, "layouts_come_back") == [[]]


@pytest.mark.ci
def test_a_host_without_memory_is_one_error_and_the_next_step_works() -> None:
    parameters = {"partitions": 2, "microbatches": 4, "pipeline": "simple", **offloading(1)}
    found = run(2, parameters, "failing")
    assert found[0] == found[1]
    text, losses = found[0]
    assert "offload_activations: the host has no" in text
    assert "rank 1" in text
    assert len(losses) == 2
    assert losses[0] == losses[1]
