"""What the ranks run for the tests of collectives between devices."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import smp_lite as smp
from smp_lite.comm.groups.axis import Axis
from smp_lite.comm.on_device.collectives import ByPlace
from smp_lite.comm.on_device.mapped import MappedCollectives
from smp_lite.comm.on_device.queued import QueuedCollectives
from smp_lite.session import current
from tests.pretended_device.groups import in_vain_after, offered
from tests.tensor.runtime_cases import Net, batches, split

__all__ = [
    "between_devices",
    "collectives_that_are_wrong",
    "decision",
    "every_collective",
    "fails_in_one_rank",
    "failure_of_one_rank",
    "forgotten",
]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8]
DTYPES += [torch.complex64]


def between_devices(function: str, by: str = "groups", **kwargs: Any) -> tuple[Any, int]:
    """What another function finds, on the host, and how many collectives it started between devices.

    Args:
        by: ``groups``: each rank has a device of its own. Else all share one: they read each other's
            ``memory``, or go by that of ``the host``.
    """
    module, _, name = function.partition(":")
    started = 0
    own = by == "groups"
    make: Any = QueuedCollectives if own else MappedCollectives
    begin = "_queue" if own else "_start"
    if by == "the host":
        os.environ["SMP_LITE_WIRE"] = "mpi"
    original = getattr(make, begin)

    def counted(self: Any, *args: Any) -> Any:
        nonlocal started
        started += 1
        return original(self, *args)

    setattr(make, begin, counted)
    try:
        with offered(own=own):
            found = getattr(importlib.import_module(module), name)(**kwargs)
        return tree_map_only(Tensor, Tensor.cpu, found), started
    finally:
        setattr(make, begin, original)


def decision(own: bool, **parameters: Any) -> str:
    """The make of collectives between replicas, and what the log says of them; or the error."""
    with offered(own=own):
        try:
            smp.init({"partitions": 1, "ddp": True, **parameters})
        except smp.SMPError as error:
            return str(error)
        session = current()
        return f"{type(session._collectives(['dp'])).__name__}: {session.describe_collectives()}"


def every_collective(kind: str, own: bool) -> list[str]:
    """Those that give something else than they should, on pretended devices."""
    with offered(own=own):
        return collectives_that_are_wrong(kind)


def forgotten(own: bool) -> list[float]:
    """A sum that nobody asks for, since something else has failed, and what the device has in the end."""
    with offered(own=own):
        smp.init()
        session = current()
        collectives = session._collectives(["dp"])
        _end(collectives.all_reduce(torch.ones(3, device=session.device)))
        collectives.all_reduce(torch.ones(5, device=session.device))
        torch.get_device_module(session.device).synchronize()
        kept = torch.ones(3, device=session.device)
        _end(collectives.all_reduce(kept))
        return kept.tolist()


def _end(pending: Any) -> None:
    while not pending.done():
        pass


def collectives_that_are_wrong(kind: str) -> list[str]:
    """The same on what devices there are."""
    smp.init()
    session = current()
    world, device = session.world, session.device
    assert world is not None
    found = world.collectives("DP") if kind == "own" else session._collectives(["dp"])
    assert type(found) is ByPlace
    is_own = world.device_groups is not None and world.device_groups.can_join(world.group("DP"))
    assert type(found.device) is (QueuedCollectives if is_own else MappedCollectives)
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
                _end(pending)
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


def fails_in_one_rank(failing: int, has_joined: bool, own: bool) -> tuple[str, list[float]]:
    """One rank of a stage fails in a block that is split: the error, and losses before and after.

    Args:
        failing: its rank.
        has_joined: it fails when it has queued a collective already, which all the others have to do; else
            before, so that the others' devices wait in vain.
    """
    with offered(own=own):
        return failure_of_one_rank(failing, has_joined, in_vain_after(0.3))


def failure_of_one_rank(failing: int, has_joined: bool, meanwhile: Any = None) -> tuple[str, list[float]]:
    """The same on what devices there are; ``meanwhile`` is entered for the step that fails."""
    smp.init()
    torch.manual_seed(0)
    net = Net()
    axis = current().axis("tp")
    split(net, axis)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    def fail(kind: str, *args: Any) -> None:
        if kind == "all_reduce":
            raise ArithmeticError("the cause")

    def fail_before(tensor: Tensor, op: str = "sum") -> Tensor:
        if type(tensor) is Tensor:  # and is not being recorded
            raise ArithmeticError("the cause")
        return Axis.all_reduce(axis, tensor, op)

    x, y = batches(1)[0]
    losses = [float(step(x, y).reduce_mean())]
    if smp.rank() == failing:
        if has_joined:
            axis.observer = fail
        else:
            axis.all_reduce = fail_before  # type: ignore[method-assign]
    with meanwhile or contextlib.nullcontext():
        try:
            text = f"nothing was raised: {step(x, y).outputs}"
        except ArithmeticError as error:
            text = str(error)
    axis.observer = None
    vars(axis).pop("all_reduce", None)
    losses.append(float(step(x, y).reduce_mean()))
    return text, losses
