"""Calls run with the state that they were recorded under, and what they leave behind is there."""

from __future__ import annotations

import pytest

from tests.transparency.comparison import compare, too_large
from tests.transparency.conftest import OpenSession
from tests.transparency.users_code.state_cases import CASES


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("num_stages", "placement", "pipeline"),
    [(2, "zigzag", "interleaved"), (3, "auto", "simple"), (2, "auto", "interleaved")],
)
@pytest.mark.parametrize("name", CASES)
def test_state(name: str, num_stages: int, placement: str, pipeline: str, open_session: OpenSession) -> None:
    open_session(num_stages, placement, pipeline=pipeline)
    assert too_large(CASES[name], compare(CASES[name], placement)) == []
