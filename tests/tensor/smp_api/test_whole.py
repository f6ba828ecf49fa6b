"""Marked layers that would lose something stay whole, and compute what they compute in one process."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.tensor.smp_api.whole_cases import LOSSES

CASES = "tests.tensor.smp_api.whole_cases"


@pytest.mark.parametrize("what", LOSSES)
def test_a_layer_that_would_lose_something_stays_whole(what: str) -> None:
    for ours, theirs, said in run_distributed(f"{CASES}:train", 2, kwargs={"what": what}):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert any(LOSSES[what][1] in text for text in said), said


def test_split_layers_are_of_the_classes_that_scripts_ask_for() -> None:
    for ours, theirs, said in run_distributed(f"{CASES}:train_by_class", 2):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert said == []


def test_what_is_split_is_not_drawn_as_if_it_were_all() -> None:
    for told in run_distributed(f"{CASES}:drawn_anew", 2):
        assert len(told) == 3 and all("is split over ranks, [8, 4] of [8, 8]" in text for text in told)
