"""What ranks run whose parameters do not lie in the order of their indices; called by `tests.harness`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["slice_of_small", "train"]

_STEPS = 3


class _Net(nn.Module):
    """Two convolutions, a matrix that lies transposed, and one with gaps; notes how they lie when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.point = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.spaced = nn.Parameter(torch.randn(6, 16)[:, ::2][:, :5].detach())
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        used = (self.wide.weight, self.point.weight, self.turned, self.spaced)
        self.seen.extend(tuple(parameter.stride()) for parameter in used)
        features = self.point(torch.tanh(self.wide(x))).mean((2, 3))
        return features @ self.turned.t() @ self.spaced


def _batch(step: int) -> Tensor:
    """Of all replicas, so that their mean is exact."""
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def _net(half: bool) -> _Net:
    torch.manual_seed(0)
    net = _Net().to(memory_format=torch.channels_last)
    return net.to(torch.bfloat16) if half else net


def train(parameters: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Trains over replicas and in one process.

    Returns:
        Of both: losses, parameters, strides of parameters and of their gradients where those are whole,
        and in the first forward; norms of gradients.
    """
    smp.init({"partitions": 1, "microbatches": 2, "ddp": True, **parameters})
    half = bool(parameters.get("bf16"))
    net = _net(half=False)
    model = smp.DistributedModel(net, **options)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    ours: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(_STEPS):
        optimizer.zero_grad()
        ours["losses"].append(step(model, _batch(number)).reduce_mean().item())
        if not half:
            ours["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    names = dict(net.named_parameters())
    ours["strides"] = {name: tuple(p.stride()) for name, p in names.items()}
    ours["gradients"] = {
        name: tuple(p.grad.stride())
        for name, p in names.items()
        if p.grad is not None and name in ("wide.weight", "turned")
    }
    ours["masters"] = {
        name: tuple(optimizer.stand_in_of(p).stride()) for name, p in names.items() if half and p.dim() > 1
    }
    ours["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    net.seen.clear()
    step(model, torch.randn(2, 3, 5, 5))  # of another shape: it is recorded, and runs, anew
    ours["seen"] = list(net.seen)

    alone = _net(half)
    theirs: dict[str, Any] = {"losses": [], "norms": []}
    inner = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number in range(_STEPS if not half else 0):
        inner.zero_grad()
        losses = [alone(x).square().mean() for x in _batch(number).chunk(2)]
        for loss in losses:
            (loss / 2).backward()
        theirs["losses"].append(torch.stack([loss.detach() for loss in losses]).mean().item())
        theirs["norms"].append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)))
        inner.step()
    theirs["state"] = dict(alone.state_dict())
    theirs["strides"] = {name: tuple(p.stride()) for name, p in alone.named_parameters()}
    alone.seen.clear()
    alone(torch.randn(1, 3, 5, 5, dtype=torch.bfloat16 if half else torch.float32))
    theirs["seen"] = list(alone.seen)
    return {"ours": ours, "theirs": theirs}


def slice_of_small(parameters: dict[str, Any]) -> str:
    """The error of asking for the slice of a parameter that stays whole and is no row."""
    smp.init({"partitions": 1, "microbatches": 1, "ddp": True, **parameters})
    net = _net(half=False)
    model = smp.DistributedModel(net)

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())

    step(model, _batch(0))
    try:
        net.wide.weight.ds_tensor.norm()  # type: ignore[union-attr, operator]
    except AttributeError as error:
        return str(error)
    return ""
