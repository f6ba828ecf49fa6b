"""What ranks run to show that they decide together about gradients of which each has its own part."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from tests.half.cases import build, net
from tests.tensor.runtime_cases import batches


def _start(parameters: dict[str, Any], module: nn.Module | None = None) -> tuple[Any, Any]:
    """A model and its step function, to which a GradScaler may be given."""
    smp.init(parameters)
    model = smp.DistributedModel(net() if module is None else module)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor, scaler: Any = None) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss if scaler is None else scaler.scale(loss))
        return loss

    return model, step


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_optimizers(parameters: dict[str, Any]) -> list[float]:
    """The norms of what two optimizers step: matrices and vectors, of all stages."""
    model, step = _start(parameters)
    members = list(model.parameters())
    groups = ([p for p in members if p.dim() > 1], [p for p in members if p.dim() < 2])
    optimizers = [smp.DistributedOptimizer(torch.optim.SGD(group, lr=0.1)) for group in groups]
    norms = []
    for x, y in batches(2):
        model.zero_grad()
        step(x, y)
        norms += [optimizer.clip_master_grads(0.01) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.step()
    return norms


def changed_after_clipping(parameters: dict[str, Any], frozen: tuple[str, ...] = ()) -> list[float]:
    """Norms of two backwards that add up, each before and after a script changes gradients of stage 0;
    ``frozen`` begins the names of what has none."""
    module = net()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    model, step = _start(parameters, module)
    optimizer = smp.DistributedOptimizer(build(model.parameters()), static_loss_scale=64.0)
    norms = []
    for x, y in batches(2):
        step(x, y)
        norms.append(optimizer.clip_master_grads(math.inf))
        for name, parameter in model.local_named_parameters():
            if name == "embed.weight" and parameter.grad is not None:
                parameter.grad.zero_()
        norms.append(optimizer.clip_master_grads(math.inf))
    optimizer.step()
    return norms


def one_overflows(parameters: dict[str, Any]) -> list[tuple[float, bool]]:
    """After each step the scale, and whether parameters have changed; one rank alone meets an infinity."""
    model, step = _start(parameters)
    optimizer = smp.DistributedOptimizer(build(model.parameters()))
    scaler = smp.amp.GradScaler("cpu", init_scale=16.0)
    found = []
    for number, (x, y) in enumerate(batches(3, smp.dp_rank())):
        optimizer.zero_grad()
        step(x, y, scaler)
        own = list(model.local_parameters())
        if number == 1 and smp.rank() == 1:
            own[0].grad[0] = math.inf
        before = [p.detach().clone() for p in own]
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), any(not torch.equal(a, b) for a, b in zip(before, own))))
    return found


class Looked(nn.Module):
    """A sparse embedding on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, sparse=True)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


def sparse(parameters: dict[str, Any]) -> list[str]:
    """Errors of clipping and stepping, and of the next step."""
    model, step = _start(parameters, Looked())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.arange(4), torch.arange(4)
    step(*batch)
    found = [error_of(lambda: optimizer.clip_master_grads(1.0)), error_of(optimizer.step)]
    optimizer.zero_grad()
    return [*found, error_of(lambda: step(*batch))]
