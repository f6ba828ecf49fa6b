"""Trains one model twice in plain torch and once by the library, and says how equal the results are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.programs.plain import Plain

__all__ = ["Run", "differences", "train"]

NUM_STEPS = 2
NUM_MICROBATCHES = 2
NOISE = 1e-6


@dataclass
class Run:
    """What a training run left behind.

    Attributes:
        values: losses, gradients of each step, parameters and buffers at the end, by name.
        seconds: of each step.
        draws: whether random numbers were drawn.
    """

    values: dict[str, Tensor | None] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    draws: bool = False


def train(api: Any, module: PreTrainedModel, batch: dict[str, Any]) -> Run:
    """Two steps of two microbatches.

    Args:
        api: the library, or :class:`tests.programs.plain.Plain`.
        module: the model; is trained in place.
        batch: keyword arguments of its forward, samples first.
    """
    run = Run()
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    model = api.DistributedModel(module)
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    @api.step
    def train_step(model: Any, batch: dict[str, Any]) -> Tensor:
        loss = loss_of(model(**batch))
        model.backward(loss)
        return loss

    for step in range(NUM_STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        losses = train_step(model, batch)
        for name, parameter in module.named_parameters():
            run.values[f"step {step} gradient {name}"] = (
                None if parameter.grad is None else parameter.grad.clone()
            )
        optimizer.step()
        run.seconds.append(time.perf_counter() - started)
        for microbatch, loss in enumerate(losses.outputs):
            run.values[f"step {step} loss {microbatch}"] = loss.detach().clone()
    run.draws = not torch.equal(random_state, torch.get_rng_state())
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        run.values[f"final {name}"] = value.detach().clone()
    return run


def loss_of(output: Any) -> Tensor:
    """The model's own loss; without one, the mean squared distance of its outputs to some fixed numbers."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss.mean()
    total = None
    for tensor in _tensors(output):
        target = torch.arange(tensor.numel()).cos().view(tensor.shape).to(tensor.dtype)
        part = F.mse_loss(tensor, target)
        total = part if total is None else total + part
    assert total is not None, "no output needs a gradient"
    return total


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def plain() -> Plain:
    """Plain torch, with the API that :func:`train` uses."""
    return Plain(NUM_MICROBATCHES)


def differences(ours: Run, plain: Run) -> list[tuple[float, str]]:
    """Relative deviation and name of all that is not the same to the bit, the largest first.

    A gradient that is zero but for rounding (a millionth of all gradients of its step together) is compared
    with all of them: its own size means nothing.
    """
    if ours.values.keys() != plain.values.keys():
        return [(float("inf"), f"other names: {sorted(ours.values.keys() ^ plain.values.keys())[:3]}")]
    totals: dict[str, float] = defaultdict(float)
    for name, value in plain.values.items():
        totals[_kind(name)] += 0.0 if value is None else float(value.double().norm() ** 2)
    found = [
        (_relative(ours.values[name], theirs, totals[_kind(name)] ** 0.5), name)
        for name, theirs in plain.values.items()
    ]
    return sorted((pair for pair in found if pair[0]), reverse=True)


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]


def _relative(ours: Tensor | None, plain: Tensor | None, total: float) -> float:
    if ours is None or plain is None:
        return 0.0 if ours is plain else float("inf")
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return float("inf")
    if torch.equal(ours, plain):
        return 0.0
    if not ours.is_floating_point() or not torch.isfinite(ours).all():
        return float("inf")
    scale = float(plain.norm())
    scale = scale if scale > NOISE * total else total
    return float((ours - plain).norm()) / scale if scale else float("inf")
