"""What the tests of other systems' configurations run in the ranks."""

from __future__ import annotations

import copy
import logging
import warnings
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


def warned(config: Any) -> str:
    """What a job is warned of while it starts and trains."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(config, num_steps=1)
    return "; ".join(str(each.message) for each in found)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.attention(x, x, x, need_weights=False)[0]).softmax(-1))


def attention(config: Any) -> dict[str, Any]:
    """What is split of torch's attention and two linear layers, and how far gradients are from the dense."""
    smp.init(config)
    torch.manual_seed(0)
    net, x = Attending(), torch.randn(4, 3, 8)
    dense = copy.deepcopy(net)
    dense(x).square().mean().backward()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch").addHandler(handler)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(x)
    logging.getLogger("torch").removeHandler(handler)
    split, difference = [], 0.0
    expected = dict(dense.named_parameters())
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        assert parameter.grad is not None
        whole = parameter.grad if layout is None else whole_of(parameter.grad, layout)
        difference = max(difference, float((whole - expected[name].grad).abs().max()))
        if layout is not None and layout.axes:
            split.append(name)
    return {"split": sorted(split), "difference": difference, "log": lines}
