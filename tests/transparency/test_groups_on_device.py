"""Collectives between devices, over process groups that carry their tensors, in real processes.

The device is pretended, and so are its groups: gloo moves the bytes. They are as late as NCCL's, so what does
not wait for one reads nonsense.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.test_on_device import run

OWN = "tests.transparency.groups_on_device"
REPLICAS = {"partitions": 1, "ddp": True}


def between_devices(function: str, ranks: int, parameters: dict[str, Any], **kwargs: Any) -> list[Any]:
    """What ranks find; each has started collectives between devices."""
    found = run(
        f"{OWN}:between_devices", ranks, parameters=parameters, kwargs={"function": function, **kwargs}
    )
    assert all(started for _, started in found)
    return [result for result, _ in found]


@pytest.mark.parametrize("kind", ["own", "shared with scripts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(ranks: int, kind: str) -> None:
    assert run(f"{OWN}:every_collective", ranks, kwargs={"kind": kind}, parameters=REPLICAS) == [[]] * ranks


@pytest.mark.parametrize(
    ("own", "parameters", "said"),
    [
        (True, {}, "ByPlace"),
        (True, {"ddp_dist_backend": "nccl"}, "ByPlace"),
        (True, {"ddp_dist_backend": "gloo"}, "StagedCollectives"),
        (True, {"ddp_dist_backend": "mpi"}, "StagedCollectives"),
        (False, {}, "StagedCollectives"),
        (False, {"ddp_dist_backend": "nccl"}, "ddp_dist_backend='nccl': ranks 0, 1 share pretended 0, and"),
    ],
)
def test_each_rank_needs_a_device_of_its_own(own: bool, parameters: dict[str, Any], said: str) -> None:
    for found in run(f"{OWN}:decision", kwargs={"own": own, **parameters}):
        assert found.startswith(said)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "batchnorm", "unused", "data_branch", "complex64"])
def test_replicas(name: str) -> None:
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "ddp": True}
    found = between_devices("tests.transparency.ranks:compare_replicas", 4, parameters, name=name)
    assert [wrong for _, wrong, _ in found] == [[]] * 4
