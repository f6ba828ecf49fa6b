"""What the ranks run for the tests of collectives between replicas inside a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["coalesced", "into_own_argument", "read_before", "written"]

_CONFIG = {"microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0}


class _Parts(nn.Module):
    """Returns what both of its parts make."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        with smp.partition(smp.pp_size() - 1):
            self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        return first, self.last(first)


class _Sums(nn.Module):
    def forward(self, x: Tensor) -> None:
        dist.all_reduce(x, group=smp.get_dp_process_group())


def _run(partitions: int, function: Callable[[Tensor, Tensor], Any], module: nn.Module | None = None) -> Any:
    """What the function makes of values of the first and of the last stage, in two steps.

    Both are the replica's number, from 1.
    """
    smp.init({**_CONFIG, "partitions": partitions})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.ModuleList([_Parts(), module or nn.Identity()]))

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        parts, _ = model.module
        first, last = parts(x)
        own = torch.full((2,), smp.dp_rank() + 1.0)
        return function(own + 0 * first.detach().sum(), own + 0 * last.detach().sum())

    found = []
    for _ in range(2):
        values = step(model, torch.ones(4, 2))
        found.append([[each.tolist() for each in value.outputs] for value in values])
    return found


def _all_reduce(mine: Tensor, group: Any) -> Tensor:
    dist.all_reduce(mine, group=group)
    return mine


def _all_gather(mine: Tensor, group: Any) -> Tensor:
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts)


def _all_gather_into_tensor(mine: Tensor, group: Any) -> Tensor:
    whole = torch.zeros(4)
    dist.all_gather_into_tensor(whole, mine, group=group)
    return whole


def _all_to_all_single(mine: Tensor, group: Any) -> Tensor:
    parts = torch.zeros(2)
    dist.all_to_all_single(parts, mine, group=group)
    return parts


def _broadcast(mine: Tensor, group: Any) -> Tensor:
    dist.broadcast(mine, 1, group=group)
    return mine


def _reduce(mine: Tensor, group: Any) -> Tensor:
    dist.reduce(mine, 0, group=group)
    return mine


def _gather(mine: Tensor, group: Any) -> Tensor:
    parts = [torch.zeros(2), torch.zeros(2)] if smp.dp_rank() == 0 else None
    dist.gather(mine, parts, dst=0, group=group)
    return mine if parts is None else torch.cat(parts)


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
}


def written(name: str) -> Any:
    """What the collective of that name writes of the replica's number, or why it is refused."""
    try:
        return _run(1, lambda mine, _: (_COLLECTIVES[name](mine, smp.get_dp_process_group()),))
    except smp.SMPError as error:
        return str(error)


def read_before() -> Any:
    """What the last stage made of a value before, and after, replicas summed it in place on the first one."""

    def function(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = last + first
        dist.all_reduce(first, group=smp.get_dp_process_group())
        return before, first * 1, last + first

    return _run(2, function)


def into_own_argument() -> Any:
    """A value that a module sums over replicas in place."""
    sums = _Sums()

    def function(first: Tensor, last: Tensor) -> tuple[Tensor]:
        sums(first)
        return (first * 1,)

    return _run(1, function, sums)


def coalesced() -> tuple[str, Any]:
    """What is said of a sum in a coalescing manager, and a sum after that."""
    smp.init({**_CONFIG, "partitions": 1})
    model = smp.DistributedModel(nn.Linear(2, 2))
    group = smp.get_dp_process_group()

    @smp.step
    def step(model: Any, x: Tensor, coalesces: bool) -> Tensor:
        total = 0 * model(x).detach().sum() + 1
        if coalesces:
            with dist._coalescing_manager(group=group):
                dist.all_reduce(total, group=group)
        dist.all_reduce(total, group=group)
        return total

    try:
        step(model, torch.ones(4, 2), True)
        said = ""
    except smp.SMPError as error:
        said = str(error)
    return said, step(model, torch.ones(4, 2), False).outputs[0].item()
