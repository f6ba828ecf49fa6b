"""Several stages on each rank: what each system's words for it become, and back."""

from __future__ import annotations

from typing import Any

import pytest

from smp_lite.systems.load.given import config_of
from smp_lite.systems.load.loading import load_plan
from smp_lite.systems.showing.conversion import convert
from smp_lite.systems.showing.explain import explain_plan

COLOSSAL = {"parallel": {"pipeline": 2}, "num_microbatches": 4, "num_model_chunks": 2}
TORCHPRIME = {"ici_mesh": {"data": 1}, "smp": {"partitions": 2, "virtual_stages": "v"}}


@pytest.mark.parametrize(
    ("parameters", "owners", "text"),
    [
        ({"virtual_stages": 2}, (0, 1, 0, 1), "4, 2 chunks on each rank: this"),
        ({"virtual_stages": "v"}, (0, 1, 1, 0), "4, 2 chunks on each rank, there and"),
        ({"virtual_stages": 3}, (0, 1, 0, 1, 0, 1), "6, 3 chunks on each rank: this"),
        ({"virtual_stages": 1}, (0, 1), "2: this library's partitioner"),
        ({"partitions": 1, "virtual_stages": 2}, (0,), "1: the whole model"),
    ],
)
def test_our_own_key(parameters: dict[str, Any], owners: tuple[int, ...], text: str) -> None:
    given = {"partitions": 2, "microbatches": 4, **parameters}
    plan = load_plan(given)
    assert plan.stages.owners == owners
    assert text in explain_plan(plan, "the parameters")
    if len(owners) > 2:
        assert plan.stages.virtual_stages == parameters["virtual_stages"]
        assert plan.said("stages").key == "virtual_stages"
    conversion = convert(plan, "sagemaker")
    assert conversion.losses == ()
    assert ('"virtual_stages"' in conversion.text) == (len(owners) > 2)


def test_a_section_of_torchprime() -> None:
    plan = load_plan(TORCHPRIME, world_size=2)
    assert plan.stages.owners == (0, 1, 1, 0)
    config = config_of(plan, has_mpi=True)
    assert (config.auto_partition, config.virtual_stages) == (True, "v")


def test_chunks_of_colossal_keep_their_own_rule_and_get_its_schedule() -> None:
    plan = load_plan(COLOSSAL, world_size=2)
    config = config_of(plan, has_mpi=True)
    # The layers go where Colossal-AI's rule puts them, so the partitioner has nothing to do.
    assert (config.auto_partition, config.virtual_stages) == (False, 1)
    assert config.pipeline == "interleaved_virtual"


def test_chunks_of_colossal_in_our_words_and_back() -> None:
    there = convert(load_plan(COLOSSAL, world_size=2), "sagemaker")
    assert '"virtual_stages": 2' in there.text
    assert '"pipeline": "interleaved_virtual"' in there.text
    back = convert(load_plan({"partitions": 2, "microbatches": 4, "virtual_stages": 2}), "colossal")
    assert "num_model_chunks = 2" in back.text
