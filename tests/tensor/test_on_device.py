"""Sharded parameters and split layers on a (pretended) device: to the bit what they are on the host.

Collectives go over groups of devices where each rank has its own; where ranks share one they read each
other's memory, or go through the host's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.sdp_cases import config
from tests.tensor.test_runtime import BASE
from tests.tensor.test_sdp import check_same
from tests.tensor.test_sharded import RULES, mesh

pytestmark = pytest.mark.pretended  # another device rounds otherwise; tests/gpu has what holds there

ON_DEVICES = "tests.transparency.devices.groups_on_device:between_devices"


WAYS = pytest.mark.parametrize("by", ["groups", "memory", "the host"])


def on_devices(function: str, ranks: int, by: str, **kwargs: Any) -> list[Any]:
    kwargs = {"function": f"tests.{function}", "by": by, **kwargs}
    found = run_distributed(ON_DEVICES, ranks, kwargs=kwargs, devices=1, timeout_s=120.0)
    assert all(bool(started) == (by != "the host") for _, started in found)
    return [result for result, _ in found]


def on_host(function: str, ranks: int, **kwargs: Any) -> list[Any]:
    return run_distributed(f"tests.{function}", ranks, kwargs=kwargs)


SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "net": (2, {"parameters": config(2)}),
    "bf16 parameters": (2, {"parameters": config(2), "half": True}),
    "fp16": (2, {"parameters": config(2, fp16=True)}),
    "small reductions": (2, {"parameters": config(2, sdp_reduce_bucket_size=10)}),
    "some stay whole": (2, {"parameters": config(2, sdp_param_persistence_threshold=40), "clip": 0.1}),
    "a pipeline": (4, {"parameters": config(2, pipeline_parallel_degree=2, microbatches=4), "model": "tied"}),
}


@pytest.mark.slow(keep=1)
@WAYS
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters(name: str, by: str) -> None:
    ranks, kwargs = SHARDED[name]
    check_same(
        on_devices("tensor.sdp_cases:train", ranks, by, **kwargs),
        on_host("tensor.sdp_cases:train", ranks, **kwargs),
    )


@pytest.mark.slow(keep=1)
@WAYS
@pytest.mark.parametrize("keys", [{}, {"fp16": True}], ids=["float32", "fp16"])
def test_sharded_state_of_the_optimizer(keys: dict[str, Any], by: str) -> None:
    parameters = {"partitions": 1, "ddp": True, "shard_optimizer_state": True, **keys}
    found = on_devices("half.cases:train", 2, by, parameters=parameters)
    for mine, theirs in zip(found, on_host("half.cases:train", 2, parameters=parameters), strict=True):
        assert mine["losses"] == theirs["losses"]
        for key in ("state", "masters"):
            assert mine[key].keys() == theirs[key].keys()
            assert all(torch.equal(value, theirs[key][name]) for name, value in mine[key].items())


@pytest.mark.slow(keep=1)
@WAYS
@pytest.mark.parametrize(("ranks", "partitions"), [(2, 1), (4, 2), (4, 1)])
def test_split_layers(ranks: int, partitions: int, by: str) -> None:
    kwargs = {"parameters": {**BASE, "partitions": partitions}}
    found, expected = on_devices("tensor.runtime_cases:train", ranks, by, **kwargs), None
    expected = on_host("tensor.runtime_cases:train", ranks, **kwargs)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        for key in ("parameters", "gradients", "state"):
            assert mine[key].keys() == theirs[key].keys()
            assert all(torch.equal(value, theirs[key][name]) for name, value in mine[key].items())


@pytest.mark.parametrize("what", ["changed inside", "changed behind autograd"])
def test_a_sharded_parameter_that_is_changed_inside_a_step_is_noticed(what: str) -> None:
    """The host looks once a step, not after each action."""
    for text in on_devices(
        "tensor.sharded_cases:refused", 2, "groups", config=mesh(RULES, fsdp=2), what=what
    ):
        assert "was changed in place inside an smp.step" in text
