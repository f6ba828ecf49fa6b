"""Every model in every schedule and placement, with one process for all stages, against plain
torch.
"""

from __future__ import annotations

import pytest

from tests.models import CASES
from tests.sampling import one_in
from tests.transparency.comparison import compare, too_large
from tests.transparency.conftest import OpenSession

NAMES = [name for name, case in CASES.items() if case.available and not case.random_in_blocks]
VARIANTS = [
    (num_stages, placement, pipeline)
    for num_stages in (2, 3)
    for placement in ("auto", "zigzag")
    for pipeline in ("simple", "interleaved")
] + [(4, "auto", "simple"), (4, "zigzag", "interleaved")]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("num_stages", "placement", "pipeline"), VARIANTS)
@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_training_equals_plain_torch(
    name: str, num_stages: int, placement: str, pipeline: str, open_session: OpenSession
) -> None:
    open_session(num_stages, placement, pipeline=pipeline)
    assert too_large(CASES[name], compare(CASES[name], placement)) == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"optimize": "speed"},
        {"active_microbatches": 1},
        {"contiguous": False},
        {"memory_weight": 0.0},
    ],
)
def test_schedule_and_partition_options(parameters: dict[str, object], open_session: OpenSession) -> None:
    open_session(3, **parameters)
    assert too_large(CASES["unet"], compare(CASES["unet"], "auto")) == []


def test_one_stage(open_session: OpenSession) -> None:
    open_session(1)
    assert too_large(CASES["gpt_tied"], compare(CASES["gpt_tied"], "auto")) == []
