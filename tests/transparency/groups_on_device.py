"""What the ranks run for the tests of collectives between devices."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import smp_lite as smp
from smp_lite.comm.device_collectives import ByPlace
from smp_lite.comm.queued_collectives import QueuedCollectives
from smp_lite.session import current
from tests.pretended_device.groups import offered

__all__ = ["between_devices", "decision", "every_collective"]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8]
DTYPES += [torch.complex64]


def between_devices(function: str, **kwargs: Any) -> tuple[Any, int]:
    """What another function finds where each rank has a device of its own; how many collectives it queued."""
    module, _, name = function.partition(":")
    started = 0
    queue = QueuedCollectives._queue

    def counted(self: QueuedCollectives, *args: Any) -> Any:
        nonlocal started
        started += 1
        return queue(self, *args)

    QueuedCollectives._queue = counted  # type: ignore[method-assign]
    try:
        with offered():
            return getattr(importlib.import_module(module), name)(**kwargs), started
    finally:
        QueuedCollectives._queue = queue  # type: ignore[method-assign]


def decision(own: bool, **parameters: Any) -> str:
    """The make of collectives between replicas; or the error."""
    with offered(own=own):
        try:
            smp.init({"partitions": 1, "ddp": True, **parameters})
        except smp.SMPError as error:
            return str(error)
        return type(current()._collectives(["dp"])).__name__


def every_collective(kind: str) -> list[str]:
    """Those that give something else than they should."""
    with offered():
        smp.init()
    session = current()
    world, device = session.world, session.device
    assert world is not None
    found = world.collectives("DP") if kind == "own" else session._collectives(["dp"])
    assert type(found) is ByPlace
    rank, size = smp.dp_rank(), smp.dp_size()
    wrong: list[str] = []

    def of(number: int, dtype: torch.dtype) -> Tensor:
        values = torch.arange(6 * size) % 5 + 10 * number + 0.25
        return (values * (1 - 2j) if dtype.is_complex else values).to(dtype)

    for place in (device, torch.device("cpu")):
        for dtype in DTYPES:
            if place.type == "cpu" and dtype in (torch.int16, torch.float16, torch.bfloat16):
                continue
            all_of_them = torch.stack([of(number, dtype) for number in range(size)])
            wide = torch.float32 if dtype.is_floating_point and dtype.itemsize == 2 else dtype
            total = all_of_them.to(wide).sum(0, dtype=wide).to(dtype)
            parts = total.view(size, -1)
            results: dict[str, tuple[Tensor, Tensor]] = {}

            def take(name: str, pending: Any, got: Tensor, expected: Tensor, into: Any = results) -> None:
                while not pending.done():
                    pass
                into[name] = got.cpu(), expected

            def mine(dtype: torch.dtype = dtype, place: Any = place) -> Tensor:
                return of(rank, dtype).to(place)

            a, b = mine(), mine()
            first, second = found.all_reduce(a), found.all_reduce(b)  # two under way
            take("second sum", second, b, total)
            take("sum", first, a, total)
            if not dtype.is_complex:
                a = mine()
                take("max", found.all_reduce(a, "max"), a, all_of_them.amax(0))
            a = mine()
            take("broadcast", found.broadcast(a, size - 1), a, all_of_them[-1])
            a = mine()
            take("reduce", found.reduce(a, 1), a, total)
            if rank != 1:
                del results["reduce"]  # what is in there is lost
            rows = torch.empty_like(all_of_them, device=place)
            take("gather", found.all_gather(mine(), rows), rows, all_of_them)
            if not (place.type == "cpu" and dtype.is_complex):
                part = torch.empty_like(parts[0], device=place)
                take("scatter", found.reduce_scatter(mine().view(size, -1), part), part, parts[rank])
            got = torch.empty(size, 6, dtype=dtype, device=place)
            sent = mine().view(size, 6)
            take("to all", found.all_to_all(sent, got), got, all_of_them.view(size, size, 6)[:, rank])
            got = torch.empty_like(mine())
            before, after = (rank - 1) % size, (rank + 1) % size
            take("shift", found.exchange(mine(), after, got, before), got, all_of_them[before])
            wrong += [
                f"{name} of {dtype} on {place.type}"
                for name, (ours, expected) in results.items()
                if not torch.equal(ours, expected)
            ]
    return wrong
