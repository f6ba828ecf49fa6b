"""Models of different characters, their real peaks of memory on ranks, and what the plan says.

The real peak is that of torch's own allocator: what the process held for tensors when a training step
began, and then every allocation and release that torch's profiler reports, those inside kernels included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from notebooks.gpt import GPT
from smp_lite.lifecycle.starting import planning
from smp_lite.plan.step.memory import StageMemory
from smp_lite.preview.memory_preview import preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.session import current
from tests.allocated import memory_profile, most_and_left

__all__ = ["JOBS", "Job", "measured_peaks", "planned_memory", "prepared"]


@dataclass(frozen=True)
class Job:
    """A model, its batch and its loss; how its ``blocks`` are checkpointed, if they are."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    strategy: str | None = None


class ConvNet(nn.Module):
    """Convolutions with batch norm, and pooling after every fourth of them."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64)
        self.blocks = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            ]
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index % 4 == 3:
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def _convolutions(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """Four of them: what they keep outweighs what goes from stage to stage."""
    layers: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1), nn.SiLU()]
    for _ in range(3):
        layers += [nn.Conv2d(out_channels, out_channels, 3, padding=1), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Skips over the middle: the way up begins on the stage where the way down ended."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolutions(3, 16)
        self.down = nn.ModuleList(_convolutions(16 << i, 32 << i, stride=2) for i in range(2))
        self.middle = _convolutions(64, 64)
        self.up = nn.ModuleList(_convolutions((64 + 32) >> i, 32 >> i) for i in range(2))
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(x)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)


class TiedMLP(nn.Module):
    """Wide layers; the last one has the weight of the first, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(384, 768)
        self.middle = nn.ModuleList(nn.Linear(768, 768) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.encode(x))
        for layer in self.middle:
            x = torch.relu(layer(x))
        return F.linear(x, self.encode.weight.t())


class Wide(nn.Module):
    """Blocks that keep far more than they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(384, 96)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), nn.Tanh()) for _ in range(12)]
        )
        self.head = nn.Linear(96, 384)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def _tokens() -> tuple[Tensor, ...]:
    tokens = torch.randint(60_000, (8, 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(*target: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randn(16, *target, generator=generator)


def _rows() -> tuple[Tensor, ...]:
    x = torch.randn(512, 384, generator=torch.Generator().manual_seed(0))
    return x, x.flip(0)


def _next_token(model: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _squared(model: Callable[..., Any], x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x), target)


JOBS = {
    "gpt": Job(
        lambda: GPT(vocab_size=60_000, d_model=32, num_blocks=4, num_heads=2, context=32),
        _tokens,
        _next_token,
    ),
    "conv": Job(ConvNet, lambda: _images(10), _squared),
    "unet": Job(UNet, lambda: _images(3, 32, 32), _squared),
    "tied": Job(TiedMLP, _rows, _squared),
    "checkpointed": Job(Wide, _rows, _squared, "each"),
    "grouped": Job(Wide, _rows, _squared, "group_2"),
}


def prepared(job: Job) -> tuple[Any, Any, tuple[Tensor, ...], Callable[..., Any]]:
    """(model, optimizer, batch, step function), in a session."""
    torch.manual_seed(0)
    model = smp.DistributedModel(job.build())
    if job.strategy is not None:
        smp.set_activation_checkpointing(model.module.blocks, strategy=job.strategy)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(model: Any, *batch: Tensor) -> Tensor:
        loss = job.loss(model, *batch)
        model.backward(loss)
        return loss

    return model, optimizer, job.inputs(), step


def planned_memory(name: str, parameters: dict[str, Any]) -> tuple[StageMemory, ...]:
    """What `smp-lite plan` says of the job."""
    with planning(parameters, stop_when_planned):
        smp.init()
        model, _, batch, step = prepared(JOBS[name])
        try:
            step(model, *batch)
        except PlanReady as ready:
            return preview_memory(current(), ready.batch, ready.recordings, ready.inputs).stages
    raise AssertionError("a step with a backward is planned before it runs")


def measured_peaks(name: str) -> tuple[int, list[int]]:
    """Runs in a rank: (its stage, bytes at the peak of each of two training steps)."""
    torch.set_num_threads(1)
    elsewhere = _held()
    smp.init()
    model, optimizer, batch, step = prepared(JOBS[name])
    losses = step(model, *batch)
    optimizer.step()
    peaks = []
    for _ in range(2):
        optimizer.zero_grad()
        held = _held() - elsewhere
        with memory_profile() as profile:
            losses = step(model, *batch)
            optimizer.step()
        peaks.append(held + most_and_left(profile)[0])
    del losses
    return smp.pp_rank(), peaks


def _held() -> int:
    """Bytes of all tensors in this process."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in found if tensor.layout is torch.strided]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())
