"""What the ranks of a distributed module know of its parameters, and draw for themselves or alike."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.test_modules import parameters_of


def test_views_of_parameters() -> None:
    found = run_distributed("tests.tensor.smp_api.cases:views", 2)
    first = "inner.seq_layers.0."
    for rank in found:
        assert rank["axes"][f"{first}attention.query.weight"] == 0
        assert rank["axes"][f"{first}attention.dense.weight"] == 1
        assert rank["axes"][f"{first}output.dense2.bias"] is None
        assert rank["axes"]["head.weight"] is None
        assert rank["shapes"][f"{first}output.dense1.weight"] == [10, 12]
        assert rank["distributed"] == [name for name, axis in rank["axes"].items() if axis is not None]
        # Inside, norms are whole and see all batches; outside, nothing does.
        assert set(rank["scaled"]) == {name for name in rank["axes"] if name.startswith("inner.")}
        assert set(rank["default"]) == set(rank["axes"]) - set(rank["scaled"])
    torch.testing.assert_close(torch.cat([rank["part"] for rank in found], 1), found[0]["whole"])


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_parts_are_dropped_apart_and_what_is_whole_alike(optimize: str) -> None:
    first, second = run_distributed("tests.tensor.smp_api.cases:dropped", 2, kwargs={"optimize": optimize})
    _, normed, heads, again, after = first
    _, others_normed, others_heads, others_again, others_after = second
    masks = [tensor == 0 for tensor in (normed, others_normed)]
    assert 0 < int(masks[0].sum()) < masks[0].numel()
    assert torch.equal(*masks) == (optimize == "speed")
    ratio, others = heads / again, others_heads / others_again
    assert not torch.equal(ratio, others)
    assert torch.equal(after, others_after)  # the common stream has gone on alike


@pytest.mark.ci
def test_layers_are_computed_again_with_the_same_numbers() -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory")}
    found = run_distributed("tests.tensor.smp_api.cases:checkpointed", 2, kwargs=kwargs)
    for (plain, calls), (again, more_calls) in found:
        assert plain == again
        assert more_calls > calls
