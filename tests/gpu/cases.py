"""What ranks run on GPUs; called by name through `tests.harness`."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

import smp_lite as smp
from smp_lite.session import current
from tests.benchmarks.workload import Workload, next_byte_loss
from tests.models import CASES
from tests.transparency.comparison import compare
from tests.transparency.schedules.planned_peaks import JOBS, prepared

__all__ = [
    "collectives_between_replicas",
    "compare_case",
    "mixed_precision",
    "out_of_memory",
    "peaks",
    "synchronisations",
    "trained",
]


def compare_case(name: str, placement: str, wire: str, tolerance: float) -> list[str]:
    """Trains a case; what differs from plain torch on this rank's GPU by more than that, relative."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    case = CASES[name]
    return [str(found) for found in compare(case, placement) if found.relative > tolerance]


def collectives_between_replicas() -> tuple[str, str]:
    """Their make, or the error instead."""
    try:
        smp.init()
    except smp.SMPError as error:
        return "", str(error)
    return type(current()._collectives(["dp"])).__name__, ""


def trained(case: str, **kwargs: Any) -> Any:
    """What another function finds, with all tensors on the host."""
    module, _, name = case.partition(":")
    found = getattr(importlib.import_module(module), name)(**kwargs)
    return tree_map_only(Tensor, Tensor.cpu, found)


def _gpt(workload: Workload) -> tuple[Any, Any]:
    model = workload.distributed(smp.pp_size())

    @smp.step
    def step(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(model(tokens), targets)
        model.backward(loss)
        return loss

    return model, step


def mixed_precision(
    dtype: str = "bfloat16", checkpointed: bool = False, scaled: bool = False, cast: bool = False
) -> tuple[list[float], list[float], list[str]]:
    """Losses of three steps, those of one process on this GPU, and this rank's parameters that differ.

    Args:
        dtype: of autocast, or with ``cast`` of the model.
        checkpointed: the blocks are.
        scaled: by a gradient scaler.
        cast: the model is, and there is no autocast.
    """
    smp.init()
    device, half = smp.state.device, getattr(torch, dtype)
    workload = Workload(128, 4, 64, 8, 4)
    plain = workload.model().to(device)
    model = workload.distributed(smp.pp_size())
    if cast:
        plain, model = plain.to(half), model.to(half)
    if checkpointed:
        for block in model.module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
    own = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    own_scaler = torch.amp.GradScaler(device.type, enabled=scaled)

    def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, half, enabled=not cast):
            return next_byte_loss(model(tokens), targets)

    @smp.step
    def step(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        model.backward(scaler.scale(loss))
        return loss

    losses, expected = [], []
    tokens, targets = workload.batch()
    for number in range(3):
        x, y = tokens.roll(number, 0), targets.roll(number, 0)
        optimizer.zero_grad()
        losses += [float(loss) for loss in step(model, x, y).outputs]
        scaler.step(optimizer)
        scaler.update()
        own.zero_grad()
        for a, b in zip(x.to(device).chunk(4), y.to(device).chunk(4), strict=True):
            loss = loss_of(plain, a, b)
            expected.append(float(loss))
            own_scaler.scale(loss / 4).backward()
        own_scaler.step(own)
        own_scaler.update()
    known = dict(plain.named_parameters())
    return losses, expected, [n for n, p in model.local_named_parameters() if not torch.equal(p, known[n])]


def synchronisations(wire: str, checkpointed: bool = False) -> tuple[str, list[str]]:
    """The session's device, and what in a step that is known waited for the GPU."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    workload = Workload(128, 4, 64, 8, 4)
    model, step = _gpt(workload)
    if checkpointed:
        for block in model.module.blocks:
            smp.set_activation_checkpointing(block)
    tokens, targets = (tensor.to(smp.state.device) for tensor in workload.batch())
    for _ in range(3):
        step(model, tokens, targets)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(model, tokens, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The first of them says besides that not all can be detected.
    waits = [
        f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "called a synchronizing" in str(w.message)
    ]
    return str(smp.state.device), waits


class _Greedy(nn.Linear):
    """Wants more memory than there is, once, where it really runs."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor) and os.environ.pop("WANTS_MEMORY", ""):
            torch.empty(1 << 44, device=x.device)
        return super().forward(x)


def out_of_memory(failing_rank: int) -> tuple[str, list[float]]:
    """The error of a step in which that rank's memory does not suffice, and losses before and after it."""
    smp.init()
    torch.manual_seed(0)
    module = nn.Sequential(_Greedy(8, 8), _Greedy(8, 8))
    model = smp.DistributedModel(module)
    for stage, layer in enumerate(module):
        smp.set_partition(layer, stage)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x, losses, text = torch.ones(4, 8), [], "nothing was raised"
    for number in range(4):
        if number == 2 and smp.rank() == failing_rank:
            os.environ["WANTS_MEMORY"] = "1"
        try:
            losses.append(float(step(model, x).reduce_mean()))
        except torch.OutOfMemoryError as error:
            text = str(error)
    return text, losses


def peaks(name: str) -> tuple[int, int]:
    """This rank's stage, and the bytes at the peak of a step, as the GPU's allocator counts them."""
    smp.init()
    model, optimizer, batch, step = prepared(JOBS[name])
    for _ in range(2):
        step(model, *batch)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, *batch)
    optimizer.step()
    torch.cuda.synchronize()
    return smp.pp_rank(), torch.cuda.max_memory_allocated()
