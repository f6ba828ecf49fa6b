"""Calls taken apart: the short way gives what the long one gives, and numbers keep their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.record.state.ambient import Ambient
from smp_lite.record.values.calls import Arguments
from smp_lite.record.values.structure import flat_spec, flatten

ONE = torch.ones(2)


@pytest.mark.parametrize("args", [(), (ONE,), (ONE, 2), (1, None, "mean", True, 2.5, ONE)])
def test_plain_arguments_have_the_spec_of_all_others(args: tuple[Any, ...]) -> None:
    leaves: list[Any] = []
    spec = flatten((args, {}), leaves)
    assert flat_spec(args, {}) == spec
    arguments = Arguments.of(args, {})
    assert all(ours is theirs for ours, theirs in zip(arguments.leaves, leaves, strict=True))
    built, keywords = arguments.build([tensor + 1 for tensor in arguments.tensors])
    assert keywords == {}
    assert all(
        torch.equal(new, old + 1) if isinstance(old, Tensor) else new is old
        for new, old in zip(built, args, strict=True)
    )


@pytest.mark.parametrize(("args", "kwargs"), [(([ONE],), {}), ((ONE,), {"dim": 0}), ((slice(1),), {})])
def test_others_are_walked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert flat_spec(args, kwargs) is None
    built = Arguments.of(args, kwargs)
    assert repr(built.build(built.tensors)) == repr((args, kwargs))


def test_equal_states_are_one_object() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = Ambient.current()
    assert first is not Ambient.current()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Ambient.current() is first
    with torch.autocast("cpu", dtype=torch.float16):
        assert Ambient.current() is not first


def test_calls_that_differ_in_the_kind_of_a_number_alone() -> None:
    smp.init_in_memory({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen: list[torch.dtype] = []

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        places = model(x).argmax(-1)
        sums = [places + number for number in (1, 1.0, True, 1, 1.0)]
        seen.extend(total.dtype for total in sums)
        return [total.sum() for total in sums]

    try:
        results = step(model, torch.randn(4, 4))
    finally:
        smp.reset()
    wanted = [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]
    assert seen == wanted * 2
    assert [result.outputs[0].dtype for result in results] == wanted
