"""What the tests of axes run in the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from smp_lite.comm.groups.axis import Axis, elements_received
from smp_lite.comm.transports.connect import connect
from smp_lite.comm.transports.transport import Transport


def axis_of_all(transport: Transport | None = None) -> Axis:
    """One axis over all ranks of the job."""
    found = transport or connect(os.environ)
    ranks = range(found.size)
    return Axis("tp", ranks, found.rank, lambda: found.collectives(ranks))


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that every dtype adds them up exactly in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, tuple(shape), generator=generator).to(dtype)


def collectives(dtype: torch.dtype, transposed: bool = False) -> dict[str, Any]:
    """Every collective once, on a tensor that differs from rank to rank."""
    axis = axis_of_all()
    shape = (2 * axis.size, 3, axis.size)
    mine = tensor_of(axis.index, shape, dtype)
    if transposed:
        mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
    before = mine.clone()
    found = {
        "sum": axis.all_reduce(mine),
        "max": axis.all_reduce(mine, "max"),
        **{f"gather{dim}": axis.all_gather(mine, dim) for dim in (0, 1, -1)},
        **{f"scatter{dim}": axis.reduce_scatter(mine, dim) for dim in (0, 2)},
        "broadcast": axis.broadcast(mine, axis.size - 1),
        "reduce": axis.reduce(mine, 1),
        "all_to_all": axis.all_to_all(mine, 0, 1),
        "shift": axis.shift(mine),
        "back": axis.shift(mine, -1),
    }
    assert torch.equal(mine, before)
    return found


def received() -> dict[str, Any]:
    axis = axis_of_all()
    collectives_on = torch.zeros(2 * axis.size, 5)
    axis.all_reduce(collectives_on)
    axis.all_gather(collectives_on)
    axis.reduce_scatter(collectives_on)
    axis.all_to_all(collectives_on, 0, 1)
    axis.broadcast(collectives_on, 0)
    axis.reduce(collectives_on, 1)
    axis.shift(collectives_on)
    return elements_received(axis)
