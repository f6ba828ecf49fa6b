"""The same comparison with a real process for each stage.

What differs from one process: transfers, that a rank holds its own stage only, that outputs and
forced values come from elsewhere, and that all ranks must plan alike.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.models import CASES
from tests.sampling import one_in
from tests.transparency.comparison import NUM_MICROBATCHES

pytestmark = pytest.mark.sampled(3)

NAMES = [name for name, case in CASES.items() if case.available and not case.random_in_blocks]
FOUR_STAGES = [
    name
    for name in ("gpt", "gpt_tied", "unet", "encoder_decoder", "t5", "reuse", "data_loop", "hooks")
    if name in NAMES
]


def check(name: str, num_ranks: int, placement: str, wire: str = "mpi", **parameters: Any) -> None:
    config = {"partitions": num_ranks, "microbatches": NUM_MICROBATCHES, **parameters}
    if placement == "zigzag":
        config |= {"auto_partition": False, "default_partition": 0}
    found = run_distributed(
        "tests.transparency.ranks:compare_case",
        num_ranks,
        kwargs={"name": name, "placement": placement, "wire": wire},
        parameters=config,
    )
    assert [wrong for wrong, _ in found] == [[]] * num_ranks
    held = [name for _, names in found for name in names]
    assert sorted(held) == sorted(name for name, _ in CASES[name].build().named_parameters())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_two_ranks_zigzag_interleaved(name: str) -> None:
    check(name, 2, "zigzag", pipeline="interleaved")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", one_in(4, NAMES))
def test_three_ranks_auto_simple(name: str) -> None:
    check(name, 3, "auto", pipeline="simple")


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(4, FOUR_STAGES))
@pytest.mark.parametrize(("placement", "pipeline"), [("zigzag", "simple"), ("auto", "interleaved")])
def test_four_ranks(name: str, placement: str, pipeline: str) -> None:
    check(name, 4, placement, pipeline=pipeline)


@pytest.mark.parametrize(
    "options", [{"optimize": "speed"}, {"active_microbatches": 1}, {"contiguous": False}]
)
def test_schedule_and_partition_options(options: dict[str, Any]) -> None:
    check("unet", 3, "auto", **options)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt_tied", "unet", "complex64", "data_loop", "autocast_part"])
def test_tensors_over_process_groups(name: str) -> None:
    check(name, 3, "zigzag", wire="c10d", ddp=True)
