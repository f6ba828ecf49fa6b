"""Collectives on tensors: each against the same computed from all ranks' tensors in one process."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from tests.harness import run_distributed
from tests.tensor.axis_cases import tensor_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives(dtype: torch.dtype, size: int) -> None:
    transposed = dtype is torch.float64
    found = run_distributed(
        "tests.tensor.axis_cases:collectives", size, kwargs={"dtype": dtype, "transposed": transposed}
    )
    theirs = [tensor_of(rank, (2 * size, 3, size), dtype) for rank in range(size)]
    total = torch.stack(theirs).sum(0).to(dtype)
    for rank, mine in enumerate(found):
        expected = {
            "sum": total,
            "max": torch.stack(theirs).amax(0),
            **{f"gather{dim}": torch.cat(theirs, dim) for dim in (0, 1, -1)},
            **{f"scatter{dim}": total.chunk(size, dim)[rank] for dim in (0, 2)},
            "broadcast": theirs[-1],
            "reduce": total if rank == 1 else None,
            "all_to_all": torch.cat([tensor.chunk(size, 0)[rank] for tensor in theirs], 1),
            "shift": theirs[(rank - 1) % size],
            "back": theirs[(rank + 1) % size],
        }
        for name, tensor in expected.items():
            assert (mine[name] is None) == (tensor is None), name
            if tensor is not None:
                assert mine[name].dtype == dtype
                assert torch.equal(mine[name], tensor), name


def test_what_is_received_is_counted_by_the_lower_bounds() -> None:
    n = 8 * 5
    share = Fraction(3, 4) * n
    each = {"all_reduce": 2 * share, "all_gather": 4 * share, "reduce_scatter": share, "all_to_all": share}
    for rank, found in enumerate(run_distributed("tests.tensor.axis_cases:received", 4)):
        expected = {**each, "shift": n}
        if rank != 0:
            expected["broadcast"] = n
        if rank == 1:
            expected["reduce"] = 3 * n
        assert found == expected


def test_fake_tensors_get_shapes_without_other_processes() -> None:
    axis = Axis("tp", range(4), 2)
    with FakeTensorMode():
        x = torch.empty(8, 3, 4)
        assert axis.all_reduce(x).shape == (8, 3, 4)
        assert axis.all_gather(x, 1).shape == (8, 12, 4)
        assert axis.reduce_scatter(x, -1).shape == (8, 3, 1)
        assert axis.broadcast(x, 0).shape == axis.shift(x).shape == (8, 3, 4)
        assert axis.all_to_all(x, 0, 2).shape == (2, 3, 16)
        assert axis.reduce(x, 2) is not None
        assert axis.reduce(x, 1) is None
    assert axis.all_gather(torch.empty(2, 3, device="meta")).shape == (8, 3)
    with pytest.raises(SMPError, match=r"split over 4 ranks \(axis 'tp'\).*smp-lite run"):
        axis.all_reduce(torch.zeros(2))


def test_an_axis_of_one_rank_does_nothing() -> None:
    axis, x = Axis("tp", [5], 0), torch.ones(3, 2)
    assert all(
        torch.equal(found, x)
        for found in (axis.all_reduce(x), axis.all_gather(x), axis.reduce_scatter(x), axis.shift(x))
    )
    assert not axis.calls


def test_a_size_that_does_not_divide_is_an_error() -> None:
    axis = Axis("tp", range(4), 0)
    with pytest.raises(
        ValueError, match=r"dimension 1 .*\[4, 6\].*4 ranks of axis 'tp': 6 is no multiple of 4"
    ):
        axis.part(torch.zeros(4, 6), 1)
