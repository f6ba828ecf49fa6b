"""Marked layers that would lose something stay whole, and compute what they compute in one process."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.tensor.smp_api.whole_cases import LOSSES


@pytest.mark.parametrize("what", LOSSES)
def test_a_layer_that_would_lose_something_stays_whole(what: str) -> None:
    for ours, theirs, said in run_distributed(
        "tests.tensor.smp_api.whole_cases:train", 2, kwargs={"what": what}
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert any(LOSSES[what][1] in text for text in said), said
