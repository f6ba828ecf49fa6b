"""Microbatches that do the same take turns with graphs; what differs between them has its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.transparency.devices.shared_graphs_on_device import GIVEN, NUM_MICROBATCHES

OWN = "tests.transparency.devices.shared_graphs_on_device"
_SAME = (1.0,) * NUM_MICROBATCHES
_WHOLE = (4,) * NUM_MICROBATCHES


def run(function: str, **kwargs: Any) -> Any:
    (found,) = run_distributed(f"{OWN}:{function}", 1, devices=1, kwargs=kwargs, timeout_s=120.0)
    return found


@pytest.mark.parametrize(
    ("what", "in_memory"),
    [
        ({"factors": _SAME, "sizes": _WHOLE}, [2, 1]),
        ({"factors": _SAME, "sizes": _WHOLE, "pipeline": "simple"}, [6, 6]),
        ({"factors": _SAME, "sizes": _WHOLE, "width": 4}, [4, 1]),
        # Of three numbers, which `==` does not tell apart from each other, beside one.
        ({"factors": (0.0, -0.0, 0, 1.0, -0.0, 0.0), "sizes": _WHOLE}, [2, 4]),
        ({"factors": _SAME, "sizes": (4, 2, 4, 2, 4, 4)}, [3, 2]),
    ],
    ids=["alike", "all in flight", "places", "numbers", "sizes"],
)
def test_graphs_are_as_many_as_microbatches_in_flight(what: dict[str, Any], in_memory: list[int]) -> None:
    expected, _, _ = run("train", **what, graphs=False)
    found, said, replayed = run("train", **what, graphs=True)
    assert all(map(torch.equal, found, expected))
    assert replayed == 2 * 3 * NUM_MICROBATCHES, said
    told = [re.findall(r"(\d+) of (\d+) segments of stage . are graphs, which share (\d+)$", s) for s in said]
    assert told == [[("6", "6", str(number))] for number in in_memory], said


@pytest.mark.parametrize("kind", GIVEN)
def test_what_code_can_tell_of_its_arguments_counts(kind: str) -> None:
    expected, _, _ = run("train_given", kind=kind, graphs=False)
    found, _, replayed = run("train_given", kind=kind, graphs=True)
    assert all(map(torch.equal, found, expected))
    assert replayed > 0


def test_a_backward_through_an_earlier_turn_is_refused() -> None:
    gradients, error = run("two_turns")
    assert gradients == [3.0, 3.0, 1.0 + 2.0]
    assert "a backward goes through a step that was replayed, a second time" in error
