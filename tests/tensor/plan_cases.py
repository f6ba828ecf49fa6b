"""What the tests of other systems' configurations run in the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.nn.plans import derive_plan, parallelize
from smp_lite.session import current
from tests.tensor.runtime_cases import WIDTH, Block, Net, batches


def consume(config: Any, num_steps: int) -> tuple[list[float], list[str]]:
    """Losses with several batches of a loader for each step, and what loaders are told that do not fit."""
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    @smp.step
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        model.backward(loss)
        return loss

    pieces = [
        {"x": x, "y": y}
        for batch in batches(num_steps)
        for x, y in zip(*[part.chunk(4) for part in batch], strict=True)
    ]
    losses = []
    for batch in smp.batches(pieces):
        optim.zero_grad()
        losses.append(step(batch).reduce_mean().item())
        optim.step()
    told = []
    short = {key: value[:1] for key, value in pieces[0].items()}
    for loader in (pieces[:3], iter(pieces[:3]), [*pieces[:3], short], [*pieces[:3], {"x": pieces[0]["x"]}]):
        try:
            list(smp.batches(loader))
        except smp.SMPError as error:
            told.append(str(error))
    return losses, told


class Blocks(nn.Module):
    """Nothing but blocks: every linear layer is one of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def losses_to_the_bit(config: Any, is_sagemaker: bool) -> list[str]:
    """Losses of the blocks alone; a script for SMP says itself what is split."""
    smp.init(config)
    torch.manual_seed(0)
    net = Blocks()
    if is_sagemaker:
        parallelize(net, current().axis("tp"), derive_plan(net))
    model = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x.roll(1, -1)).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for x, _ in batches(4):
        optim.zero_grad()
        losses.append(step(x).reduce_mean().item().hex())
        optim.step()
    return losses


def train(config: Any, overrides: tuple[str, ...] = (), num_steps: int = 3) -> dict[str, Any]:
    """Losses of this replica, whole parameters at the end, and where modules lie."""
    smp.init(config, overrides=overrides)
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for x, y in batches(num_steps, smp.rdp_rank()):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        optim.step()
    found, split = {}, []
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        found[name] = whole_of(parameter, layout) if layout is not None else parameter.detach()
        if layout is not None and layout.axes:
            split.append(name)
    return {
        "losses": losses,
        "parameters": found,
        "split": split,
        "replica": smp.rdp_rank(),
        "norms": [],
        "coordinate": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()),
    }


def told(config: Any) -> str:
    """What a configuration that does not fit is told."""
    try:
        train(config, num_steps=1)
    except (smp.SMPError, ValueError) as error:
        return str(error)
    return ""
