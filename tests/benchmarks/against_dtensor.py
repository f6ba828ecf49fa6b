"""Blocks of attention and MLP split by columns and rows: ours, and by DTensor's ``parallelize_module``.

Both run in the same ranks with one thread each, on the same weights, the same batch and the same plan: query,
key, value and the MLP's first layer by columns, the output and the second by rows. DTensor goes over gloo,
ours over MPI. A step is zero_grad, forward and backward. *Layers* are ours in plain torch, as DTensor's are;
*whole* is the same model in ``smp.step``, which is how a script runs it: recorded, planned and executed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.nn.plans import parallelize
from smp_lite.session import current
from tests.benchmarks.spread import Spread, slowest_rank
from tests.harness import run_distributed

__all__ = ["compare_in_ranks", "table"]

_PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
_BATCH, _TOKENS, _HEAD, _NUM_BLOCKS = 2, 16, 16, 2
_WARM_UP_STEPS = 4
_TOLERANCE = 1e-5
"""Relative. Times are worth comparing only where all compute the same."""


def table(quick: bool) -> Table:
    """Runs the comparison and describes it."""
    num_rounds = 2 if quick else 10
    result = Table(
        "d",
        "ranks",
        "DTensor ms",
        "layers ms",
        "DTensor / layers",
        "whole ms",
        "DTensor / whole",
        "difference",
        title=f"Column and row pairs against DTensor's parallelize_module, {_NUM_BLOCKS} blocks, B {_BATCH}, "
        f"T {_TOKENS}, {num_rounds} rounds: median (quartiles); largest difference of gradients",
    )
    for features in (64,) if quick else (128, 512):
        for ranks in (2, 4):
            found = _compare(features, ranks, num_rounds)
            theirs, layers, whole = (
                slowest_rank([rank.seconds[who] for rank in found]) for who in ("theirs", "layers", "whole")
            )
            result.add_row(
                str(features),
                str(ranks),
                Spread.of(theirs).text(1e-3),
                Spread.of(layers).text(1e-3),
                Spread.of([other / own for other, own in zip(theirs, layers, strict=True)]).text(digits=2),
                Spread.of(whole).text(1e-3),
                Spread.of([other / own for other, own in zip(theirs, whole, strict=True)]).text(digits=2),
                f"{max(rank.difference for rank in found):.1e}",
            )
    return result


class Block(nn.Module):
    """Attention and MLP, as a script would write them for DTensor: heads are counted by their width."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.head_size = _HEAD
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        # A bias of keys changes nothing: its gradient is nothing but rounding.
        self.query, self.key, self.value = (nn.Linear(features, features, bias=False) for _ in range(3))
        self.output = nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, features]`` to the same."""
        y = self.norm1(x)
        query = self.query(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        key = self.key(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        value = self.value(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Blocks(nn.Module):
    """Some of them."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(features) for _ in range(_NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, features]`` to the same."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class RankTimes:
    """One rank's seconds of each step, and how far ours lie from DTensor's gradients (relative)."""

    seconds: dict[str, list[float]]
    difference: float


def _compare(features: int, ranks: int, num_rounds: int) -> list[RankTimes]:
    kwargs = {"features": features, "num_rounds": num_rounds}
    found: list[RankTimes] = run_distributed(
        f"{__name__}:compare_in_ranks", ranks, kwargs=kwargs, timeout_s=600.0
    )
    difference = max(rank.difference for rank in found)
    if not difference <= _TOLERANCE:
        raise RuntimeError(f"d {features}, {ranks} ranks: gradients differ by {difference:.1e} relative")
    return found


def compare_in_ranks(features: int, num_rounds: int) -> RankTimes:
    """Runs in every rank: alternating steps, then a check that all computed the same."""
    torch.set_num_threads(1)
    ranks = MPI.COMM_WORLD.Get_size()
    smp.init({"parallel": {"tensor": {"size": ranks, "mode": "1d"}}})
    assert dist.get_backend() == "gloo"  # of torch.distributed, which smp.init has started
    torch.manual_seed(0)
    dense = Blocks(features)
    x = torch.randn(_BATCH, _TOKENS, features)
    steps: dict[str, tuple[Callable[[], Any], nn.Module]] = {
        "theirs": _theirs(copy.deepcopy(dense), x, ranks),
        "layers": _layers(copy.deepcopy(dense), x),
        "whole": _whole(copy.deepcopy(dense), x),
    }
    for _ in range(_WARM_UP_STEPS):
        for step, _ in steps.values():
            step()
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(num_rounds):
        for who, (step, _) in steps.items():
            seconds[who].append(_timed(step))
    gradients = {who: _whole_gradients(model) for who, (_, model) in steps.items()}
    difference = max(
        float((ours[name] - gradient).abs().max() / gradient.abs().max())
        for ours in (gradients["layers"], gradients["whole"])
        for name, gradient in gradients["theirs"].items()
    )
    return RankTimes(seconds, difference)


def _theirs(model: nn.Module, x: Tensor, ranks: int) -> tuple[Callable[[], Any], nn.Module]:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(model, mesh, {pattern: styles[style]() for pattern, style in _PLAN.items()})
    return _plain(model, x), model


def _layers(model: nn.Module, x: Tensor) -> tuple[Callable[[], Any], nn.Module]:
    parallelize(model, current().axis("tp"), _PLAN)
    return _plain(model, x), model


def _plain(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def _whole(model: nn.Module, x: Tensor) -> tuple[Callable[[], Any], nn.Module]:
    smp.parallelize(model, _PLAN)
    wrapped = smp.DistributedModel(model)

    @smp.step
    def forward_backward(x: Tensor) -> Tensor:
        loss = wrapped(x).square().mean()
        wrapped.backward(loss)
        return loss

    def step() -> None:
        wrapped.zero_grad()
        forward_backward(x)

    return step, model


def _timed(step: Callable[[], Any]) -> float:
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, by name; collective."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient, layout = parameter.grad, layout_of(parameter)
        assert gradient is not None, name
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found[name] = whole_of(gradient, layout) if layout is not None else gradient
    return found
