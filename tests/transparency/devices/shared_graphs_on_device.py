"""What ranks run whose microbatches take turns with graphs; called by name through `tests.harness`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.devices import home
from smp_lite.runtime.graphs.captured import CapturedSegment
from smp_lite.runtime.graphs.stage_graphs import GRAPHS_VARIABLE

__all__ = ["GIVEN", "NUM_MICROBATCHES", "train", "train_given", "two_turns"]

NUM_MICROBATCHES = 6
_STEPS = 6


def train(
    factors: Sequence[Any], sizes: Sequence[int], graphs: bool, width: int = 32, **parameters: Any
) -> tuple[list[Any], list[str], int]:
    """Losses and gradients, what is said of graphs, and how many forwards were replays.

    Args:
        factors: by microbatch, a plain number that a function of the last stage is given.
        sizes: of each microbatch's batch, as far as the step function goes on with it.
        graphs: whether there are any.
        width: of the model; batches of 8 begin at other places in memory for each microbatch.
        parameters: of the library, beside those that graphs want.
    """
    _start(graphs, **parameters)
    net = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def loss_of(model: Any, x: Tensor, number: int) -> Tensor:
        y = model(x[: sizes[number]])
        return torch.atan2(y * factors[number], torch.full_like(y, -1.0)).square().mean()

    return _trained(net, width, loss_of)


def _start(graphs: bool, **parameters: Any) -> None:
    os.environ[GRAPHS_VARIABLE] = str(int(graphs))
    common = {"partitions": 2, "pipeline": "interleaved", "microbatches": NUM_MICROBATCHES}
    smp.init_in_memory({**common, "static_mode": True, **parameters})
    torch.manual_seed(0)


def _trained(
    net: nn.Module, width: int, loss_of: Callable[[Any, Tensor, int], Tensor]
) -> tuple[list[Any], list[str], int]:
    """``loss_of`` is given the model, a microbatch and its number."""
    model = smp.DistributedModel(net)
    turns = [0]

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        number = turns[0] % NUM_MICROBATCHES
        turns[0] += 1
        loss = loss_of(model, x, number)
        model.backward(loss)
        return loss

    found: list[Any] = []
    for number in range(_STEPS):
        model.zero_grad()
        torch.manual_seed(number)
        found += [
            loss.detach().cpu() for loss in step(model, torch.randn(NUM_MICROBATCHES * 4, width)).outputs
        ]
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    stages = [executor.graphs for executor in smp.state.model.runtime.executors.values()]
    used = [stage for stage in stages if stage is not None]
    return found, [stage.text() for stage in used], sum(stage.replayed for stage in used)


class _Bag(dict[str, Tensor]):
    """With a number that no look at its entries shows."""

    scale = 1.0


class _Second(nn.Module):
    """Looks at what it is given in each way that a class knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: Any, a: Tensor, b: Tensor) -> Tensor:
        factor = 1.0
        if isinstance(given, dict):
            factor = getattr(given, "scale", 1.0) + 2.0 * any(key is True for key in given)
            (given,) = given.values()
        if a is b:
            factor += 4.0
        if a.is_conj():
            factor += 8.0
        return self.linear(given) * factor + a.real + b.real


def _bag(y: Tensor, number: int) -> _Bag:
    found = _Bag(y=y)
    found.scale = float(number)
    return found


#: What the second block is given, from a value, two tensors, and the microbatch's number.
GIVEN: dict[str, Callable[[Any, Tensor, Tensor, int], tuple[Any, Tensor, Tensor]]] = {
    "a class of the script's": lambda y, a, b, number: (_bag(y, number), a, b),
    "keys": lambda y, a, b, number: ({True if number % 2 else 1: y}, a, b),
    "one tensor, twice": lambda y, a, b, number: (y, a, a),
    "one tensor, sometimes twice": lambda y, a, b, number: (y, a, a if number % 2 else b),
    "conjugated": lambda y, a, b, number: (y, a.conj() if number % 2 else a, b),
}


class _Giving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 8), _Second(), kind

    def forward(self, x: Tensor, a: Tensor, b: Tensor, number: int) -> Tensor:
        return self.second(*GIVEN[self.kind](self.first(x), a, b, number))


def train_given(kind: str, graphs: bool) -> tuple[list[Any], list[str], int]:
    """As :func:`train`."""
    _start(graphs, auto_partition=False, default_partition=0)
    net = _Giving(kind)
    smp.set_partition(net.second, 1)
    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    tensors = [torch.randn(4, 8).to(dtype=dtype, device=home()) for _ in range(2)]
    return _trained(net, 8, lambda model, x, number: model(x, *tensors, number).square().mean())


def two_turns() -> tuple[list[float], str]:
    """The gradients of two forwards by one graph in turn; and the error of a backward through the first that
    comes while the second is in flight."""
    smp.init_in_memory({"partitions": 1})
    weight = nn.Parameter(torch.full((1,), 3.0, device=home()))
    held = [weight]

    class StandIns:
        def __enter__(self) -> list[Tensor]:
            held[0] = nn.Parameter(weight.detach())
            return [held[0]]

        def __exit__(self, *error: object) -> None:
            held[0] = weight

    def run(imports: dict[int, Tensor], given: Sequence[Tensor]) -> dict[int, Tensor]:
        return {1: imports[0] * held[0]}

    leaves = [torch.full((1,), x, device=home(), requires_grad=True) for x in (1.0, 2.0)]
    captured = CapturedSegment(run, {0: leaves[0]}, [], [weight], [], lambda _: StandIns(), has_backward=True)

    def forward(leaf: Tensor) -> Tensor:
        return captured.forward({0: leaf}, [], run)[1]

    def backward(output: Tensor) -> None:
        start = torch.autograd.graph.get_gradient_edge(output)
        gradient = torch.ones_like(output)
        captured.prepare([start], [gradient])
        torch.autograd.backward([output], [gradient], retain_graph=True)

    first = forward(leaves[0])
    backward(first)
    second = forward(leaves[1])
    error = ""
    try:
        backward(first)
    except smp.SMPError as refused:
        error = str(refused)
    backward(second)
    gradients = [each.grad for each in (*leaves, weight)]
    return [float(gradient) for gradient in gradients if gradient is not None], error
