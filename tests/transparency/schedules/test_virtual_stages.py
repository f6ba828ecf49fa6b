"""Several pieces of the model on each stage change no number: over MPI, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed
from tests.transparency.schedules.virtual_stages import NAMES

RANKS = "tests.transparency.schedules.virtual_stages"
TURNS = {
    (2, 2): (0, 1, 0, 1),
    (2, 3): (0, 1, 0, 1, 0, 1),
    (2, "v"): (0, 1, 0),
    (4, 2): (0, 1, 2, 3, 0, 1, 2, 3),
    (4, "v"): (0, 1, 2, 3, 2, 1, 0),
}
PIPELINES = ("interleaved", "simple")
OWN = ((2, "interleaved_virtual"), (3, "interleaved_virtual"), ("v", "zero_bubble_v"))


def check(name: str, num_ranks: int, shapes: list[dict[str, Any]]) -> None:
    given = [{"partitions": num_ranks, **shape} for shape in shapes]
    kwargs = {"name": name, "all_parameters": given}
    for rank in run_distributed(f"{RANKS}:train", num_ranks, kwargs=kwargs, timeout_s=180.0):
        for shape, (wrong, visits) in zip(shapes, rank, strict=True):
            assert wrong == [], shape
            turns = TURNS[num_ranks, shape["virtual_stages"]]
            # A tied head is where its embedding is, whoever has the last piece.
            comes_back = "tied" in name or "around" in name
            assert visits == (turns if turns[-1] == 0 or not comes_back else (*turns, 0)), shape


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("tied", ((2, "simple"), (3, "interleaved"), ("v", "interleaved"), OWN[0], OWN[2])),
        ("plain", ((2, "interleaved"), ("v", "simple"), OWN[1], OWN[2])),
        ("dropout around blocks", ((2, "simple"), ("v", "interleaved"), OWN[2])),
        ("dropout in blocks", ((3, "interleaved"), OWN[2])),
    ],
)
def test_two_ranks(name: str, shapes: Any) -> None:
    check(name, 2, [{"virtual_stages": v, "pipeline": pipeline} for v, pipeline in shapes])


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_in_all_shapes(name: str) -> None:
    shapes = [(v, pipeline) for v in (2, 3, "v") for pipeline in PIPELINES]
    check(name, 2, [{"virtual_stages": v, "pipeline": pipeline} for v, pipeline in (*shapes, *OWN)])


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((2, "interleaved"), OWN[2]), (("v", "simple"), OWN[0])])
@pytest.mark.parametrize("name", ["tied", pytest.param("plain", marks=pytest.mark.thorough)])
def test_four_ranks(name: str, shapes: Any) -> None:
    check(name, 4, [{"virtual_stages": v, "pipeline": pipeline} for v, pipeline in shapes])


def test_activation_checkpointing() -> None:
    shapes = [{"virtual_stages": 2}, {"virtual_stages": "v", "pipeline": "zero_bubble_v"}]
    check("tied", 2, [{**shape, "checkpointed": True} for shape in shapes])


def test_replicas() -> None:
    found = run_distributed(f"{RANKS}:replicas", 4, kwargs={"parameters": {"virtual_stages": 2}})
    assert found == [([], (0, 1, 0, 1, 0))] * 4


@pytest.mark.slow
def test_checkpoints_move_between_shapes(tmp_path: Path) -> None:
    for number, (before, after) in enumerate(((1, 2), (3, "v"))):
        kwargs = {
            "folder": str(tmp_path / str(number)),
            "before": {"virtual_stages": before},
            "after": {"virtual_stages": after},
        }
        for rank, said in enumerate(run_distributed(f"{RANKS}:checkpoints", 2, kwargs=kwargs)):
            turns = (0, 1, 0, 1, 0) if after == 2 else (0, 1, 0)
            assert said["full"] == said["portable"] == (True, turns)
            assert said["full warnings"] == said["portable warnings"] == []
            # A partial one brings its own partition.
            assert said["partial"] == (True, said["before"])
            told = ["the order 0 1 0." in text for text in said["partial warnings"]]
            assert told == ([True] if before == 1 and rank == 0 else [])
            assert "was saved with another partition than this model has" in said["late"]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"virtual_stages": 20},
            r"virtual_stages=20 with partitions=2 cuts the model into 40 pieces, but it ",
        ),
        (
            {"virtual_stages": 2, "auto_partition": False, "default_partition": 0},
            "smp.partition and smp.set_partition may simply come to a partition again",
        ),
    ],
)
def test_what_cannot_be_had_is_said_on_every_rank(parameters: dict[str, Any], text: str) -> None:
    for said in run_distributed(f"{RANKS}:told", 2, kwargs={"parameters": parameters}):
        assert said.startswith("error: ") and text in said


@pytest.mark.parametrize(
    ("parameters", "places", "text"),
    [
        (
            {"pipeline": "interleaved_virtual"},
            {5: 1},
            "is for several pieces on each stage, and here the",
        ),
        ({"pipeline": "interleaved_virtual"}, {3: 1, 5: 0, 8: 1}, ""),
        (
            {"pipeline": "zero_bubble_v"},
            {3: 1, 5: 0, 8: 1},
            "is for two pieces, there and back, on each stage, and here the line of modules comes to the "
            "stages in the order 0 1 0 1 0: a step is ordered as well as that allows.",
        ),
        ({"pipeline": "zero_bubble_v"}, {3: 1, 8: 0}, ""),
    ],
)
def test_a_pipeline_for_another_shape_is_warned_of(
    parameters: dict[str, Any], places: dict[int, int], text: str
) -> None:
    """By hand: from some of the blocks on, another stage; a tied head is on stage 0."""
    by_hand = {**parameters, "auto_partition": False, "default_partition": 0}
    kwargs = {"parameters": by_hand, "places": places, "tied": len(places) > 1}
    first, _ = run_distributed(f"{RANKS}:told", 2, kwargs=kwargs)
    assert text in first and bool(first) == bool(text)
