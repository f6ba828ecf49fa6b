"""What :mod:`.test_waiting_state` runs on two stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import smp_lite as smp

STAGES: dict[str, Any] = {"partitions": 2, "microbatches": 2}


class Net(nn.Module):
    """Four layers, statistics, and extra state that a loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.zeros(4))
        self.heat = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) / self.heat
        return x

    def get_extra_state(self) -> float:
        return self.heat

    def set_extra_state(self, state: float) -> None:
        self.heat = state


def _begin(seed: int) -> tuple[smp.DistributedModel, smp.DistributedOptimizer]:
    smp.reset()
    smp.init(STAGES)
    torch.manual_seed(seed)
    model = smp.DistributedModel(Net())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def _loop(model: smp.DistributedModel, optimizers: list[smp.DistributedOptimizer], steps: int) -> list[float]:
    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(steps):
        if isinstance(model.module, Net):
            model.module.heat *= 1.5
        for each in optimizers:
            each.zero_grad()
        losses.append(step(torch.ones(4, 4)).reduce_mean().item())
        for each in optimizers:
            each.step()
    return losses


def _saved(folder: str, kind: str) -> tuple[dict[str, Any], list[float]]:
    """The state when it was saved, and the losses of two steps more."""
    model, optimizer = _begin(0)
    _loop(model, [optimizer], 2)
    smp.save_checkpoint(
        folder,
        "t",
        model=model,
        optimizer=optimizer,
        partial=kind == "partial",
        **({"portable": True} if kind == "portable" else {}),
    )
    return model.state_dict(), _loop(model, [optimizer], 2)


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "sum": lambda net: net.blocks[0].weight.sum(),
    "zero_": lambda net: nn.init.zeros_(net.blocks[0].weight),
    "data": lambda net: net.blocks[0].weight.data,
    "of a buffer": lambda net: net.seen.add_(1),
    "a copy": copy.deepcopy,
    "detach": lambda net: net.state_dict(),
}


def resumed(folder: str, kind: str) -> dict[str, Any]:
    """Everything that a script may do between resuming and the first step."""
    state, expected = _saved(folder, kind)
    told = {}
    model, _ = _begin(5)
    smp.resume_from_checkpoint(folder, "t", partial=kind == "partial")
    for name, look in LOOKS.items():
        with torch.no_grad():
            try:
                told[name] = str(look(model.module))
            except smp.SMPError as error:
                told[name] = str(error)
    model.module.double()
    try:
        converted = str(float(model.module.seen.sum()))
    except smp.SMPError as error:
        converted = str(error)
    model.module.float()
    count = sum(p.numel() for p in model.parameters())
    shown = f"{next(model.module.blocks[0].parameters())}"
    net = model.module
    smp.reset()
    net(torch.ones(1, 4))  # whoever goes on with it has what was built
    model, optimizer = _begin(5)
    smp.resume_from_checkpoint(folder, "t", partial=kind == "partial")
    assert isinstance(model.module, Net)
    heat = model.module.heat
    losses = _loop(model, [optimizer], 2)
    kinds = {type(p).__name__ for p in model.module.parameters()}
    model, optimizer = _begin(5)
    smp.resume_from_checkpoint(folder, "t", partial=kind == "partial")
    optimizer.param_groups[0]["lr"] = 0.0
    halves = {key: value / 2 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    model.load_state_dict(halves)
    _loop(model, [optimizer], 1)
    again = model.state_dict()
    return {
        "told": told,
        "converted": converted,
        "count": count,
        "shown": shown,
        "heat": heat,
        "losses": (losses, expected),
        "kinds": kinds,
        "rate": optimizer.param_groups[0]["lr"],
        "halved": all(
            torch.equal(again[key], value) for key, value in halves.items() if isinstance(value, torch.Tensor)
        ),
    }


def several(folder: str) -> dict[str, Any]:
    """Two optimizers, each of which loads its own state before the first step."""

    def begin() -> tuple[smp.DistributedModel, list[smp.DistributedOptimizer]]:
        smp.reset()
        smp.init(STAGES)
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
        members = list(model.parameters())
        return model, [
            smp.DistributedOptimizer(torch.optim.AdamW([p for p in members if p.dim() == dims], lr=rate))
            for dims, rate in ((2, 0.01), (1, 0.1))
        ]

    model, both = begin()
    _loop(model, both, 3)
    smp.save_checkpoint(folder, "t", model=model, optimizer=both[0], partial=True)
    whole, parts = model.state_dict(), copy.deepcopy([each.local_state_dict() for each in both])
    expected = _loop(model, both, 3)
    model, both = begin()
    model.load_state_dict(whole)
    for each, part in zip(both, parts, strict=True):
        each.load_state_dict(part)
    losses = _loop(model, both, 3)
    other = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        other.load_state_dict({**parts[0], "param_groups": parts[0]["param_groups"]})
        kind = "loaded"
    except ValueError as error:
        kind = str(error)
    begin_again = begin()
    try:
        smp.resume_from_checkpoint(folder, "t")
        told = "resumed"
    except smp.SMPError as error:
        told = str(error)
    smp.resume_from_checkpoint(folder, "t", load_optimizer=False)
    _loop(*begin_again, 1)
    return {"losses": (losses, expected), "told": told, "kind": kind}
