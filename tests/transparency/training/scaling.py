"""Training with a gradient scaler where the gradient of one stage overflows, against plain torch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import smp_lite as smp
from tests.models import split_batch
from tests.transparency.comparison import NUM_MICROBATCHES, on, place
from tests.transparency.training.norms import error_of, same
from tests.transparency.training.replicas import half

__all__ = ["VARIANTS", "compare"]

WIDTH = 4
STAGES = {"first": 0, "first.linear": 0, "last": 1, "last.linear": 1}


class Spiked(nn.Module):
    """A layer, and a bias whose gradient is as large as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spike = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.spike * gain


class Net(nn.Module):
    """One spike on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Spiked()
        self.last = Spiked()

    def forward(self, x: Tensor, gains: Tensor) -> Tensor:
        x = self.first(x, gains[:, :1])
        return self.last(x, gains[:, 1:])


def batch(step_index: int, samples: int = 8) -> dict[str, Tensor]:
    """Steps 1 and 3 overflow: on stage 0 alone, and on stage 1 alone; where there are replicas, in one."""
    generator = torch.Generator().manual_seed(step_index)
    gains = torch.zeros(samples, 2)
    if step_index % 4 == 1:
        gains[0, 0] = 1e37
    if step_index % 4 == 3:
        gains[0, 1] = 1e37
    return {"x": torch.randn(samples, WIDTH, generator=generator), "gains": gains}


def loss_of(output: Tensor) -> Tensor:
    return output.sum() + output.square().mean()


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, **options)


def build(frozen: str = "") -> Net:
    torch.manual_seed(5)
    net = Net()
    for name, module in net.named_children():
        module.requires_grad_(name != frozen)
    return net


VARIANTS: dict[str, dict[str, Any]] = {
    "torch's scaler": {},
    "smp's scaler": {"own": True},
    "unscaled and clipped first": {"clip": True},
    "fused": {"fused": True},
    "fused, unscaled first": {"fused": True, "clip": True},
    "inner optimizer": {"inner": True},
    "optimizer not wrapped": {"wrapped": False},
    "frozen stage 0": {"frozen": "first"},
    "frozen stage 1": {"frozen": "last"},
    "disabled": {"enabled": False},
}


def compare(
    *,
    num_steps: int = 8,
    own: bool = False,
    clip: bool = False,
    fused: bool = False,
    inner: bool = False,
    wrapped: bool = True,
    frozen: str = "",
    enabled: bool = True,
    replicas: int = 1,
    reload: bool = True,
) -> list[str]:
    """In the session that is open; what differs from plain torch.

    Args:
        num_steps: of training.
        own: ``smp.amp.GradScaler`` instead of torch's.
        clip: ``unscale_`` and clip before ``step``.
        fused: the optimizer unscales by itself.
        inner: the scaler steps the optimizer inside the DistributedOptimizer.
        wrapped: there is a DistributedOptimizer.
        frozen: child without gradients.
        enabled: whether it scales.
        replicas: plain replicas that average their gradients.
        reload: a new scaler takes over in the midst with the state of the first.
    """
    kind = smp.amp.GradScaler if own else torch.amp.GradScaler
    options = {"init_scale": 1024.0, "growth_interval": 2, "enabled": enabled}
    net = build(frozen)
    model = smp.DistributedModel(net)
    place(net, STAGES)
    optimizer: Any = adam(net.parameters(), fused=fused)
    if wrapped:
        optimizer = smp.DistributedOptimizer(optimizer)
    stepped = optimizer.optimizer if inner else optimizer
    device = smp.state.device
    scaler = kind(device.type, **options)
    plains = [build(frozen).to(device) for _ in range(replicas)]
    optimizers = [adam(plain.parameters(), fused=fused) for plain in plains]
    scalers = [torch.amp.GradScaler(device.type, **options) for _ in plains]

    @smp.step
    def train(model: Any, x: Tensor, gains: Tensor) -> Tensor:
        loss = loss_of(model(x, gains))
        model.backward(scaler.scale(loss))
        return loss

    wrong, scales = [], []
    for step_index in range(num_steps):
        inputs = batch(step_index, 8 * replicas)
        optimizer.zero_grad()
        train(model, **(half(inputs, smp.dp_rank()) if replicas > 1 else inputs))
        if clip:
            scaler.unscale_(stepped)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(stepped)
        scaler.update()
        for replica, plain in enumerate(plains):
            optimizers[replica].zero_grad()
            mine = on(device, half(inputs, replica) if replicas > 1 else inputs)
            for part in split_batch(mine, NUM_MICROBATCHES):
                loss = loss_of(plain(part["x"], part["gains"])) / NUM_MICROBATCHES
                scalers[replica].scale(loss).backward()
        for parameters in zip(*(plain.parameters() for plain in plains)):
            found = [parameter.grad / replicas for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(found[1:], found[0]).clone() if found else None
        for plain, plain_optimizer, plain_scaler in zip(plains, optimizers, scalers):
            if clip:
                plain_scaler.unscale_(plain_optimizer)
                clip_grad_norm_(plain.parameters(), 0.5)
            plain_scaler.step(plain_optimizer)
            plain_scaler.update()
        if scaler.state_dict() != scalers[0].state_dict():
            wrong.append(f"step {step_index}: {scaler.state_dict()} for {scalers[0].state_dict()}")
        scales.append(scaler.get_scale())
        wanted = dict(plains[0].named_parameters())
        wrong += [
            f"step {step_index}: {name}"
            for name, parameter in model.local_named_parameters()
            if not same(parameter.data, wanted[name].data)
        ]
        if step_index == 4 and enabled and reload:
            state = scaler.state_dict()
            scaler = kind(device.type)
            scaler.load_state_dict(state)
    if enabled and not frozen:  # the scale fell in steps 1, 3, 5 and 7, and nowhere else
        assert scales == [1024, 512, 512, 256, 256, 128, 128, 64], scales
    return wrong


# What ranks run ---------------------------------------------------------------------------------------------


def compare_on_ranks(**options: Any) -> list[str]:
    smp.init()
    return compare(**options)


def start(**model_options: Any) -> tuple[Any, Any, Any, Any]:
    """A model, its optimizer, a scaler and a step function."""
    smp.init()
    net = build()
    model = smp.DistributedModel(net, **model_options)
    place(net, STAGES)
    optimizer = smp.DistributedOptimizer(adam(net.parameters()))
    scaler = smp.amp.GradScaler("cpu", init_scale=1024.0)

    @smp.step
    def train(model: Any, x: Tensor, gains: Tensor) -> Tensor:
        loss = loss_of(model(x, gains))
        model.backward(scaler.scale(loss))
        return loss

    return model, optimizer, scaler, train


def between_reductions() -> list[tuple[float, bool]]:
    """Gradients that are not averaged yet: one replica overflows on one stage, and all ranks skip.

    Returns:
        After each step the scale, and whether any parameter here has changed.
    """
    model, optimizer, scaler, train = start(backward_passes_per_step=2)
    found = []
    for step_index in (2, 1, 4, 6):  # the first and third are before the reduction
        inputs = batch(0 if step_index == 1 else step_index)
        if step_index == 4 and smp.dp_rank() == 1:
            inputs = batch(3)
        optimizer.zero_grad()
        train(model, **inputs)
        before = [p.detach().clone() for p in model.local_parameters()]
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
        found.append((scaler.get_scale(), changed))
    return found


def no_gradients() -> dict[str, str]:
    """Nothing to check on any rank; and a scaler that steps inside the step function."""
    model, optimizer, scaler, train = start()
    found = {}

    @smp.step
    def inside(model: Any, x: Tensor, gains: Tensor) -> Tensor:
        loss = loss_of(model(x, gains))
        model.backward(scaler.scale(loss))
        found["inside"] = error_of(lambda: scaler.step(optimizer))
        return loss

    train(model, **batch(0))
    inside(model, **batch(0))
    optimizer.zero_grad()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        found["none"] = str(error)
    return found


def absent_rank() -> str:
    """Rank 1 does not call."""
    model, optimizer, scaler, train = start()
    train(model, **batch(0))
    smp.set_watchdog(1.0)
    try:
        if smp.rank() == 1:
            time.sleep(3.0)
            return ""
        return error_of(lambda: scaler.step(optimizer))
    finally:
        smp.set_watchdog(None)


class Taking(torch.optim.SGD):
    """An optimizer that is given the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        raise NotImplementedError  # it is refused before it could step


def own_logic() -> str:
    model, _, scaler, train = start()
    optimizer = smp.DistributedOptimizer(Taking(model.parameters(), lr=0.1))
    train(model, **batch(0))
    return error_of(lambda: scaler.step(optimizer))
