"""Scripts in which ranks do what only one of them knows; each returns what it sees, or its error."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp

__all__ = [
    "async_sum",
    "at_a_rate",
    "first_step_fails",
    "memory_of_failures",
    "odd_uses",
    "pretrained",
    "replicas",
    "world_sum",
]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _start(**parameters: Any) -> tuple[smp.DistributedModel, smp.DistributedOptimizer, Callable[..., Any]]:
    smp.init({"microbatches": 2, **parameters})
    torch.manual_seed(0)
    model = smp.DistributedModel(_net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return model, optimizer, step


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def _error(run: Callable[[], Any]) -> str:
    try:
        run()
    except smp.SMPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _step(optimizer: smp.DistributedOptimizer, *, fails: str = "") -> None:
    """A step of the optimizer, which fails before or after it has changed parameters; the error is caught."""

    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("the state of the first step")

    register = {
        "before": optimizer.optimizer.register_step_pre_hook,
        "after": optimizer.optimizer.register_step_post_hook,
    }
    hook = register[fails](out_of_memory) if fails else None
    with contextlib.suppress(torch.OutOfMemoryError):
        optimizer.step()
    if hook is not None:
        hook.remove()


def at_a_rate(what: str) -> str:
    """One rank of a replica does this alone after the second step."""
    model, optimizer, step = _start(partitions=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    generator = torch.Generator().manual_seed(0)

    def run() -> None:
        for number in range(4):
            optimizer.zero_grad()
            step(model, *_batch(generator))
            alone = number == 1 and smp.rank() == 0
            if what == "skips" and alone:
                continue
            if number == 1 and what in ("all fail before", "all fail after"):
                _step(optimizer, fails=what.removeprefix("all fail "))
            else:
                _step(optimizer, fails="before" if what == "fails" and alone else "")
            if what == "all" or (what == "scheduler" and alone):
                scheduler.step()
            elif what == "weight decay" and alone:
                optimizer.param_groups[0]["weight_decay"] = 0.1
            elif what == "clears" and alone:
                optimizer.zero_grad()

    return _error(run)


def replicas(what: str) -> str:
    """One replica does this alone."""
    model, optimizer, step = _start(ddp=True, partitions=1)
    generator = torch.Generator().manual_seed(smp.dp_rank())

    def run() -> None:
        for number in range(4):
            optimizer.zero_grad()
            step(model, *_batch(generator))
            alone = number == 1 and smp.dp_rank() == 1
            if what == "skips" and alone:
                continue
            if number == 1 and what in ("all fail before", "all fail after"):
                _step(optimizer, fails=what.removeprefix("all fail "))
            else:
                _step(optimizer, fails="before" if what == "fails" and alone else "")
            if what == "rate" and alone:
                optimizer.param_groups[0]["lr"] = 0.01
            elif what == "mode" and alone:
                model.eval()
            elif what == "weights" and alone:
                with torch.no_grad():
                    next(iter(model.local_parameters())).mul_(1.5)

    return _error(run)


def parts_at_a_rate(what: str) -> str:
    """An optimizer for each half of the model, or for this rank's own parameters; one rank slows its last."""
    partitions = 1 if what == "replicas" else 2
    smp.init({"microbatches": 2, "partitions": partitions, "ddp": True})
    torch.manual_seed(0)
    net = _net()
    model = smp.DistributedModel(net)
    step = smp.step(lambda model, x: model.backward(model(x).square().mean()))
    generator = torch.Generator().manual_seed(smp.dp_rank())
    members = [net[0].parameters(), net[2].parameters()]
    if what == "own":
        step(model, _batch(generator)[0])
        members = [model.local_parameters()]
    optimizers = [smp.DistributedOptimizer(torch.optim.SGD(part, lr=0.1)) for part in members]
    if what == "own":  # each stage may have its own, which its replicas have too
        optimizers[0].param_groups[0]["lr"] = 0.1 + 0.1 * smp.pp_rank()

    def run() -> None:
        for number in range(3):
            step(model, _batch(generator)[0])
            for optimizer in optimizers:
                optimizer.step()
            if number == 1 and smp.rank() == smp.size() - 1:
                optimizers[-1].param_groups[0]["lr"] = 0.01

    return _error(run)


def pretrained() -> tuple[bool, list[str]]:
    """Rank 0 alone loads weights before the model is wrapped; whether results are that model's."""
    smp.init({"partitions": 2, "microbatches": 2})
    torch.manual_seed(7)
    plain = _net()
    torch.manual_seed(smp.rank())
    net = _net()
    if smp.rank() == 0:
        net.load_state_dict(plain.state_dict())
    model = smp.DistributedModel(net)

    @smp.step
    def forward(model: Any, x: Tensor) -> Tensor:
        return model(x)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = forward(model, x).concat()
        expected = torch.cat([plain(part) for part in x.chunk(2)])
    return torch.equal(found, expected), [str(warning.message) for warning in heard]


class _Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if smp.dp_rank() == 1:
            time.sleep(0.2)  # the other replica is done by then
        return x


def async_sum(partitions: int) -> list[tuple[float, float]]:
    """Of each microbatch a sum over replicas that nobody waits for but ``wait()``, and what it should be."""
    smp.init({"partitions": partitions, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*_net().children(), _Late()))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        total = loss.detach().clone()
        work = dist.all_reduce(total, group=smp.get_dp_process_group(), async_op=True)
        model.backward(loss)
        assert work.wait() and work.is_completed()
        return loss, total

    generator = torch.Generator().manual_seed(smp.dp_rank())
    found: list[tuple[float, float]] = []
    for _ in range(2):
        losses, totals = step(model, *_batch(generator))
        told = smp.allgather([float(loss) for loss in losses.outputs], smp.DP_GROUP)
        wanted = [sum(each) for each in zip(*told, strict=True)]
        found += zip([float(total) for total in totals.outputs], wanted, strict=True)
    return found


def world_sum() -> tuple[str, str]:
    """Collectives inside a step that ranks of other stages would have to join, or that cannot block."""
    model, _, _ = _start(partitions=2, ddp=True)
    smp.set_watchdog(20)

    @smp.step
    def sums(model: Any, x: Tensor) -> Tensor:
        total = model(x).sum().detach()
        dist.all_reduce(total)
        return total

    @smp.step
    def sends(model: Any, x: Tensor) -> Tensor:
        total = model(x).sum().detach()
        dist.isend(total, 0)
        return total

    return _error(lambda: sums(model, torch.ones(4, 4))), _error(lambda: sends(model, torch.ones(4, 4)))


def first_step_fails(partitions: int, ddp: bool, fails_in: int) -> list[tuple[str, bool]]:
    """One rank has no memory before its model call; of each step the error, and whether it is such a one."""
    model, optimizer, _ = _start(partitions=partitions, ddp=ddp)
    smp.set_watchdog(20)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor, number: int) -> Tensor:
        if number == fails_in and smp.rank() == 1:
            raise torch.OutOfMemoryError("transient")
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(3):
        optimizer.zero_grad()
        batch = _batch(generator)
        try:
            step(model, *batch, number)
        except Exception as error:
            found.append((str(error), isinstance(error, torch.OutOfMemoryError)))
            continue
        optimizer.step()
        found.append(("", False))
    return found


def memory_of_failures() -> bool:
    """Both ranks fail in their first step, one later: whether what the other gets then is its own still."""
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(_net())
    rank = smp.rank()

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        if rank == 0:
            time.sleep(1.0)
        raise ValueError("early")

    with contextlib.suppress(ValueError):
        step(model, torch.ones(4, 4))
    del model, step
    smp.reset()
    gc.collect()
    kept = [torch.full((2,), 7, dtype=torch.int64) for _ in range(20_000)]
    smp.init({"partitions": 2, "microbatches": 2})
    smp.barrier()
    return all(bool((tensor == 7).all()) for tensor in kept)


def odd_uses() -> dict[str, str]:
    """What is refused by name, or simply works."""
    model, _, _ = _start(partitions=2)
    found = {}
    try:
        pickle.dumps(model)
    except smp.SMPError as error:
        found["pickle"] = str(error)
    copied = copy.deepcopy(model)
    found["copy"] = type(copied).__name__

    @smp.step
    def empty(model: Any, x: Tensor, negatives: Tensor) -> Tensor:
        return model(x).sum() + negatives.sum()

    with torch.no_grad():
        total = empty(model, torch.ones(4, 4), torch.zeros(0, 4))
    found["empty"] = str(len(total.outputs))
    smp.reset()
    smp.init({"partitions": 2, "microbatches": 2})
    try:
        smp.DistributedModel(torch.compile(_net(), backend="eager"))
    except smp.SMPError as error:
        found["compiled"] = str(error)
    return found
