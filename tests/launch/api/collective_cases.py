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


class _Sums(nn.Module):
    """Sums over replicas, in place."""

    def forward(self, x: Tensor) -> None:
        dist.all_reduce(x, group=smp.get_dp_process_group())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.sums = _Sums()
        with smp.partition(smp.pp_size() - 1):
            self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        return first, self.last(first)


def _run(partitions: int, function: Callable[[_Net, Tensor, Tensor], Any]) -> Any:
    """What the function makes of a value of the first stage, the replica's number from 1, and zeros of the
    last one, in two steps."""
    smp.init({**_CONFIG, "partitions": partitions})
    model = smp.DistributedModel(_Net())

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        first, last = model(x)
        mine = 0 * first.detach()[0] + (smp.dp_rank() + 1)
        found = function(model.module, mine, 0 * last.detach()[0])
        model.backward(last.sum())
        return found

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
        return _run(1, lambda _, mine, zeros: (1 * _COLLECTIVES[name](mine, smp.get_dp_process_group()),))
    except smp.SMPError as error:
        return str(error)


def read_before() -> Any:
    """What the last stage makes of a value before replicas sum it in place on the first one, and the sum."""

    def function(net: _Net, mine: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        before = zeros + mine
        dist.all_reduce(mine, group=smp.get_dp_process_group())
        return before, mine

    return _run(2, function)


def into_own_argument() -> Any:
    """The same where a module sums."""

    def function(net: _Net, mine: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        before = zeros + mine
        net.sums(mine)
        return before, mine

    return _run(2, function)


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
