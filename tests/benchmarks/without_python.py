"""What a segment would gain if none of its Python ran: its forward as it is against a trace of it.

On a device such a replay is a graph (:mod:`smp_lite.runtime.graphs`). On a processor the same kernels could
be called without Python by TorchScript, which runs a trace as it was recorded, to the bit, where it may not
optimize. So the two times say what ``static_mode`` could gain there by running no Python, the module calls'
own included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor, nn

from tests.benchmarks.spread import Spread
from tests.benchmarks.workload import Workload

__all__ = ["table"]

_SIZES = ((128, 4, 64, 2), (128, 4, 64, 4), (512, 4, 256, 2))
"""d, blocks, T and samples of a microbatch: half of the models that schedules are compared on."""


def table(quick: bool) -> Table:
    """Runs both in turn in this process, with one thread, and checks that their results are equal."""
    num_rounds = 3 if quick else 40
    result = Table(
        "blocks of one stage",
        "forward, us",
        "trace over forward",
        "trace over forward, with backward",
        title=f"A forward without any Python, {num_rounds} rounds in turn: median (quartiles)",
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for d_model, num_blocks, length, num_samples in _SIZES:
            workload = Workload(d_model, num_blocks, length, num_samples)
            blocks = nn.Sequential(*workload.model().blocks)
            x = torch.randn(num_samples, length, d_model)
            own, forwards, whole = _rounds(blocks, x, num_rounds)
            result.add_row(
                str(workload), own.text(1e-6, digits=0), forwards.text(digits=3), whole.text(digits=3)
            )
    finally:
        torch.set_num_threads(before)
    return result


def _rounds(blocks: nn.Module, x: Tensor, num_rounds: int) -> tuple[Spread, Spread, Spread]:
    """Seconds of the forward; ratios of the trace to it, without and with backward."""
    with torch.jit.optimized_execution(False):
        traced = torch.jit.trace(blocks, (x,), check_trace=False)
        times: list[tuple[float, float, float, float]] = []
        for number in range(num_rounds + 2):
            own_forward, own_whole, own = _run(blocks, blocks, x)
            forward, whole, found = _run(traced, blocks, x)
            assert all(map(torch.equal, own, found))
            if number >= 2:  # warm
                times.append((own_forward, own_whole, forward, whole))
    return (
        Spread.of([own_forward for own_forward, *_ in times]),
        Spread.of([forward / own_forward for own_forward, _, forward, _ in times]),
        Spread.of([whole / own_whole for _, own_whole, _, whole in times]),
    )


def _run(
    forward: Callable[[Tensor], Tensor], blocks: nn.Module, x: Tensor
) -> tuple[float, float, list[Tensor]]:
    """Seconds until the end of forward and of backward; the result and all gradients."""
    given = x.clone().requires_grad_()
    blocks.zero_grad()
    start = time.perf_counter()
    y = forward(given)
    after_forward = time.perf_counter()
    y.backward(torch.ones_like(y))
    after_backward = time.perf_counter()
    assert given.grad is not None
    gradients = [p.grad for p in blocks.parameters() if p.grad is not None]
    return after_forward - start, after_backward - start, [y.detach(), given.grad, *gradients]
