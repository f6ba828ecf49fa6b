"""Training in half precision by plain torch in one process: what the library's results are compared with.

Written from the rules alone (SMP's fp16 after Megatron-LM's): a model in half precision, gradients of
microbatches summed in it, of a loss in float32 times a scale; float32 masters; skip and halve on overflow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Scale:
    """A dynamic scale with hysteresis 1, or a static one."""

    def __init__(self, init: float, window: int | None) -> None:
        self.value, self.window, self.clean = init, window, 0
        self.history: list[float] = []
        self.skipped: list[bool] = []

    def update(self, overflow: bool) -> None:
        self.skipped.append(overflow)
        if self.window is not None:
            self.clean = 0 if overflow else self.clean + 1
            if overflow:
                self.value = max(self.value / 2, 1.0)
                self.clean = 0
            elif self.clean == self.window:
                self.value, self.clean = self.value * 2, 0
        self.history.append(self.value)


class Masters:
    """Plain masters of a half model, as an optimizer's parameters."""

    def __init__(
        self, model: nn.Module, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.halves = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.halves]
        self.optimizer = build(self.masters)

    def step(self, scale: Scale, clip: float | None, norms: list[float]) -> None:
        gradients = [p.grad for p in self.halves]
        overflow = any(g is not None and not torch.isfinite(g).all() for g in gradients)
        if not overflow:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = None if gradient is None else gradient.float() / scale.value
            if clip is not None:
                members = [p for group in self.optimizer.param_groups for p in group["params"]]
                norms.append(float(torch.nn.utils.clip_grad_norm_(members, clip)))
        elif clip is not None:
            norms.append(-1.0)
        scale.update(overflow)
        if not overflow:
            self.optimizer.step()
            with torch.no_grad():
                for half, master in zip(self.halves, self.masters, strict=True):
                    half.copy_(master)


def microbatch_gradients(
    model: nn.Module, kind: torch.dtype, x: torch.Tensor, y: torch.Tensor, microbatches: int, scale: float
) -> float:
    """Adds the gradients of a batch to the model's; its loss."""
    losses = []
    for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.cross_entropy(model(part.to(kind)).float(), target)
        loss.backward(torch.full_like(loss, scale / microbatches))
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def train(
    net: nn.Module,
    mode: str,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    microbatches: int = 1,
    init_scale: float = 1.0,
    window: int | None = None,
    clip: float | None = None,
    passes: int = 1,
    poison: Sequence[int] = (),
    others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> dict[str, Any]:
    """Losses, norms, parameters, masters, scales.

    Args:
        poison: steps with an infinite gradient.
        others: batches of a second replica; gradients are halved, in half precision, and added.
    """
    kind = TYPES[mode]
    model = copy.deepcopy(net).to(kind)
    masters = Masters(model, build)
    scale = Scale(init_scale if mode == "fp16" else 1.0, window if mode == "fp16" else None)
    losses: list[float] = []
    norms: list[float] = []
    for number, (x, y) in enumerate(batches):
        if number % passes == 0:
            model.zero_grad()
        losses.append(microbatch_gradients(model, kind, x, y, microbatches, scale.value))
        if others:
            first = [p.grad for p in masters.halves]
            model.zero_grad()
            microbatch_gradients(model, kind, *others[number], microbatches, scale.value)
            for half, gradient in zip(masters.halves, first, strict=True):
                half.grad = gradient / 2 + half.grad / 2
        if (number + 1) % passes:
            continue
        if (number + 1) // passes - 1 in poison:
            masters.halves[0].grad[0] = math.inf
        masters.step(scale, clip, norms)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {
        "losses": losses,
        "norms": norms,
        "state": {name: value.detach() for name, value in model.state_dict().items()},
        "masters": dict(zip(names, [m.detach() for m in masters.masters], strict=True)),
        "scales": scale.history,
        "skipped": scale.skipped,
    }
