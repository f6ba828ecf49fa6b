"""Gradients of tensors that are no parameters of the model, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models.layers import WIDTH, Chain, regression_batch

__all__ = ["differences", "differences_on_rank"]


class UsesInputTwice(Chain):
    """The input goes to the first block and, as a skip, to the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + x.tanh())


def run(library: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = UsesInputTwice()
    prompt = nn.Parameter(torch.randn(WIDTH))  # the user's own, outside of the model
    scale = torch.ones(1, requires_grad=True)
    frozen = torch.randn(WIDTH)
    criterion = nn.Linear(WIDTH, 1)
    model: Any = smp.DistributedModel(module) if library else module
    optimizer: Any = torch.optim.SGD([*model.parameters()], lr=0.1)
    if library:
        optimizer = smp.DistributedOptimizer(optimizer)
    outside = torch.optim.SGD([prompt, scale, *criterion.parameters()], lr=0.1)

    def function(model: Any, x: Tensor, target: Tensor) -> Tensor:
        prompted = x + prompt * 2 + frozen
        output = model(prompted) * scale
        loss = F.mse_loss(output, target) + criterion(output).square().mean()
        model.backward(loss) if library else (loss / 2).backward()
        return loss

    found: dict[str, Any] = {"losses": []}
    for number in range(3):
        batch = regression_batch(8)
        x = batch["x"].roll(number, 0).requires_grad_()
        optimizer.zero_grad()
        outside.zero_grad()
        if library:
            loss = smp.step(function)(model, x, batch["target"]).reduce_mean()
        else:
            parts = [function(model, *part) for part in zip(x.chunk(2), batch["target"].chunk(2))]
            loss = (parts[0] + parts[1]).detach() / 2
        found["losses"].append(loss)
        found[f"input {number}"] = x.grad.clone()
        found[f"prompt {number}"] = prompt.grad.clone()
        found[f"scale {number}"] = scale.grad.clone()
        found[f"criterion {number}"] = criterion.weight.grad.clone()
        optimizer.step()
        outside.step()
    found["prompt"] = prompt.detach().clone()
    return found


def differences(tolerance: float = 1e-6) -> list[str]:
    """What differs from plain torch, in the session that is open."""
    ours, plain = run(True), run(False)
    wrong = []
    for name, value in plain.items():
        pairs = zip(ours[name], value) if isinstance(value, list) else [(ours[name], value)]
        for a, b in pairs:
            if float((a - b).norm()) > tolerance * float(b.norm()):
                wrong.append(f"{name}: {a} instead of {b}")
    return wrong


def differences_on_rank() -> list[str]:
    smp.init()
    return differences()
