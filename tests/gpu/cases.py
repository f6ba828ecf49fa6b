"""What ranks run on GPUs; called by name through `tests.harness`."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import smp_lite as smp
from smp_lite.session import current
from tests.benchmarks.workload import Workload, next_byte_loss
from tests.models import CASES
from tests.transparency.comparison import compare
from tests.transparency.planned_peaks import JOBS, prepared

__all__ = [
    "collectives_between_replicas",
    "compare_case",
    "out_of_memory",
    "peaks",
    "synchronisations",
    "trained",
]


def _deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def compare_case(name: str, placement: str, wire: str, tolerance: float) -> list[str]:
    """Trains a case; what differs from plain torch on this rank's GPU by more than that, relative."""
    _deterministic()
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
    _deterministic()
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
    """Wants more memory than there is, once."""

    wants = False

    def forward(self, x: Tensor) -> Tensor:
        if _Greedy.wants:
            _Greedy.wants = False
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
        _Greedy.wants = number == 2 and smp.rank() == failing_rank
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
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, *batch)
    torch.cuda.synchronize()
    return smp.pp_rank(), torch.cuda.max_memory_allocated()
