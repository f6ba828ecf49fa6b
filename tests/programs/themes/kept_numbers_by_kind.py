"""What a helper of the blocks may keep its count in, each kind alone; functions of autograd."""

from __future__ import annotations

import collections
import functools
import queue
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.small import Net, batches
from tests.programs.themes.kept_numbers import Half, trained

Change = Callable[[Tensor], Tensor]


def _list_iterator() -> Change:
    source = iter([1.0 - 0.02 * i for i in range(40)])
    return lambda x: x * next(source)


def _cycle_of_a_dict() -> Change:
    source = iter({0.1 * i: i for i in range(1, 40)})
    return lambda x: x * next(source)


def _deque() -> Change:
    source = collections.deque([1.0, 0.7, 0.4])

    def change(x: Tensor) -> Tensor:
        source.rotate(1)
        return x * source[0]

    return change


def _counter() -> Change:
    source: collections.Counter[str] = collections.Counter()

    def change(x: Tensor) -> Tensor:
        source["calls"] += 1
        return x / source["calls"]

    return change


def _namespace() -> Change:
    source = types.SimpleNamespace(calls=0)

    def change(x: Tensor) -> Tensor:
        source.calls += 1
        return x / source.calls

    return change


def _array() -> Change:
    source = np.zeros(2)

    def change(x: Tensor) -> Tensor:
        source[0] += 1
        return x / float(source[0])

    return change


def _queue() -> Change:
    source: queue.SimpleQueue[float] = queue.SimpleQueue()
    for i in range(40):
        source.put(1 - 0.02 * i)
    return lambda x: x * source.get()


def _popped() -> Change:
    source = [0.02 * i for i in range(40)]
    return lambda x: x * source.pop()


def _random() -> Change:
    source = random.Random(4)
    return lambda x: x * source.random()


def _thread_local() -> Change:
    source = threading.local()
    source.calls = 0

    def change(x: Tensor) -> Tensor:
        source.calls += 1
        return x / source.calls

    return change


def _wrapped() -> Change:
    def inner(x: Tensor) -> Tensor:
        return torch.sin(x)

    @functools.wraps(inner)
    def run(x: Tensor) -> Tensor:
        run.calls += 1  # type: ignore[attr-defined]
        return inner(x) / run.calls  # type: ignore[attr-defined]

    run.calls = 0  # type: ignore[attr-defined]
    return run


def _wrapped_of_torch() -> Change:
    calls = [0]

    @functools.wraps(torch.sin)
    def run(x: Tensor) -> Tensor:
        calls[0] += 1
        return torch.sin(x) / calls[0]

    return run


def _partial() -> Change:
    def change(calls: list[int], x: Tensor) -> Tensor:
        calls.append(1)
        return x / len(calls)

    return functools.partial(change, [])


def _tensor() -> Change:
    source = torch.zeros(())

    def change(x: Tensor) -> Tensor:
        source.add_(1)
        return x / source.clone()

    return change


KINDS = {
    kind.__name__: kind
    for kind in (
        _list_iterator,
        _cycle_of_a_dict,
        _deque,
        _counter,
        _namespace,
        _array,
        _queue,
        _popped,
        _random,
        _thread_local,
        _wrapped,
        _wrapped_of_torch,
        _partial,
        _tensor,
    )
}


def _register(name: str, kind: Callable[[], Change]) -> None:
    def run(smp: Any, out: Any) -> None:
        trained(smp, out, kind())

    run.__name__ = f"kept_in{name}"
    program(stages=(2,), ranks=(2,))(run)


for _name, _kind in KINDS.items():
    _register(_name, _kind)


class Reverse(torch.autograd.Function):
    """Gradient reversal whose strength is a class attribute, as in many DANN repositories."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.neg() * Reverse.strength


class Scale(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Scale.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _by_loop(smp: Any, out: Any, kind: Any, attribute: str, within: bool) -> None:
    setattr(kind, attribute, 1.0)
    net = Net()
    net.blocks = nn.ModuleList(Half(kind.apply) for _ in range(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if within:
            setattr(kind, attribute, getattr(kind, attribute) * 0.7)
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train(model, x, y).reduce_mean())
        optimizer.step()
        setattr(kind, attribute, getattr(kind, attribute) * 0.8)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def reversal_set_between_steps(smp: Any, out: Any) -> None:
    """The strength changes between steps alone."""
    _by_loop(smp, out, Reverse, "strength", within=False)


@program(stages=(2,), ranks=(2,))
def reversal_set_in_the_step(smp: Any, out: Any) -> None:
    """The strength changes in the step function, before each forward; backward reads it."""
    _by_loop(smp, out, Reverse, "strength", within=True)


@program(stages=(2,), ranks=(2,))
def factor_set_between_steps(smp: Any, out: Any) -> None:
    """The forward's factor changes between steps alone."""
    _by_loop(smp, out, Scale, "factor", within=False)


@program(stages=(2,), ranks=(2,))
def factor_set_in_the_step(smp: Any, out: Any) -> None:
    """The forward's factor changes in the step function, before each forward."""
    _by_loop(smp, out, Scale, "factor", within=True)
