"""Collectives between devices, in real processes: over process groups that carry their tensors where ranks
have a device each, by reading each other's memory where they share one.

The device is pretended, and so are its groups: gloo moves the bytes. They are as late as NCCL's, so what does
not wait for one reads nonsense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_script
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.devices.test_on_device import run

OWN = "tests.transparency.devices.groups_on_device"
REPLICAS = {"partitions": 1, "ddp": True}


def between_devices(function: str, ranks: int, parameters: dict[str, Any], **kwargs: Any) -> list[Any]:
    """What ranks find; each has started collectives between devices."""
    found = run(
        f"{OWN}:between_devices", ranks, parameters=parameters, kwargs={"function": function, **kwargs}
    )
    assert all(started for _, started in found)
    return [result for result, _ in found]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["own", "shared with scripts"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("own", [True, False])
def test_every_collective(own: bool, ranks: int, kind: str) -> None:
    kwargs = {"kind": kind, "own": own}
    assert run(f"{OWN}:every_collective", ranks, kwargs=kwargs, parameters=REPLICAS) == [[]] * ranks


@pytest.mark.parametrize("own", [True, False])
def test_memory_stays_of_what_nobody_asks_for(own: bool) -> None:
    assert run(f"{OWN}:forgotten", kwargs={"own": own}, parameters=REPLICAS) == [[2.0, 2.0, 2.0]] * 2


@pytest.mark.pretended
@pytest.mark.parametrize(
    ("own", "parameters", "said"),
    [
        (True, {}, "ByPlace: sums pretended_groups"),
        (True, {"ddp_dist_backend": "nccl"}, "ByPlace: sums pretended_groups"),
        (True, {"ddp_dist_backend": "gloo"}, "StagedCollectives: sums through the host's memory"),
        (True, {"ddp_dist_backend": "mpi"}, "StagedCollectives: sums through the host's memory"),
        (False, {}, "ByPlace: sums ipc"),
        (False, {"ddp_dist_backend": "gloo"}, "StagedCollectives: sums through the host's memory"),
        (False, {"ddp_dist_backend": "nccl"}, "ddp_dist_backend='nccl': ranks 0, 1 share pretended 0, and"),
    ],
)
def test_each_rank_needs_a_device_of_its_own(own: bool, parameters: dict[str, Any], said: str) -> None:
    for found in run(f"{OWN}:decision", kwargs={"own": own, **parameters}):
        assert found.startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "batchnorm", "unused", "data_branch", "complex64"])
@pytest.mark.parametrize("by", ["groups", "memory"])
def test_replicas(by: str, name: str) -> None:
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "ddp": True}
    kwargs = {"name": name, "by": by, "wire": "ipc" if by == "memory" else "mpi"}
    found = between_devices("tests.transparency.ranks:compare_replicas", 4, parameters, **kwargs)
    assert [wrong for _, wrong, _ in found] == [[]] * 4
    assert name != "gpt" or all(buckets for _, _, buckets in found)  # started in the backward


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("has_joined", [True, False])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_a_rank_of_a_stage_that_fails_and_the_next_step(own: bool, failing: int, has_joined: bool) -> None:
    """What the others' devices wait for is aborted, and the ranks talk anew."""
    parameters = {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    kwargs = {"failing": failing, "has_joined": has_joined, "own": own}
    found = run(f"{OWN}:fails_in_one_rank", parameters={**parameters, "microbatches": 2}, kwargs=kwargs)
    for text, losses in found:
        assert "ArithmeticError: the cause" in text
        assert losses[0] == losses[1]


@pytest.mark.ci
def test_a_device_that_waits_in_vain_is_the_named_end_of_the_job() -> None:
    """Its process stands in a call of the driver (here: gloo's) in which no Python runs."""
    script = Path(__file__).parent / "one_does_not_come.py"
    environment = {"SMP_LITE_PRETENDED_DEVICES": "1", "SMP_LITE_WATCHDOG_S": "6"}
    ended = run_script([str(script)], 2, env=environment)
    assert ended.returncode != 0
    assert all(f"rank {rank} has [2.0, 2.0, 2.0]" in ended.stdout for rank in range(2))
    said = "SMPTimeout: waited 6 s: a collective between the devices of ranks 0, 1 has begun and does not end"
    assert said in ended.stderr
