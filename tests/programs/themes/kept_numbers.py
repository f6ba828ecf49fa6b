"""Where blocks keep numbers between calls, asked one way at a time; evaluation on replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.small import Net, NormNet, batches, make_step


class Half(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(torch.tanh(self.linear(x)))


def trained(smp: Any, out: Any, change: Callable[[Tensor], Tensor]) -> None:
    net = Net()
    net.blocks = nn.ModuleList(Half(change) for _ in range(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


class Meter:
    total = 0

    def __init__(self) -> None:
        self.seen = 0

    @classmethod
    def by_class(cls, x: Tensor) -> Tensor:
        cls.total += 1
        return x / cls.total

    @staticmethod
    def by_name(x: Tensor) -> Tensor:
        Meter.total += 1
        return x / Meter.total

    def by_object(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x / self.seen

    def __call__(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x / self.seen


@program(stages=(2,), ranks=(2,))
def counted_by_a_class_method(smp: Any, out: Any) -> None:
    """A class method counts in its class."""
    Meter.total = 0
    trained(smp, out, Meter.by_class)
    out.value("count", Meter.total)


@program(stages=(2,), ranks=(2,))
def counted_by_a_static_method(smp: Any, out: Any) -> None:
    """A static method counts in its class."""
    Meter.total = 0
    trained(smp, out, Meter.by_name)
    out.value("count", Meter.total)


@program(stages=(2,), ranks=(2,))
def counted_by_a_bound_method(smp: Any, out: Any) -> None:
    """All blocks share a bound method of one object."""
    meter = Meter()
    trained(smp, out, meter.by_object)
    out.value("count", meter.seen)


@program(stages=(2,), ranks=(2,))
def counted_by_a_callable_object(smp: Any, out: Any) -> None:
    """All blocks share one callable object."""
    meter = Meter()
    trained(smp, out, meter)
    out.value("count", meter.seen)


@program(stages=(2,), ranks=(2,))
def counted_by_a_closure(smp: Any, out: Any) -> None:
    """A closure counts in a nonlocal."""
    count = 0

    def change(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x / count

    trained(smp, out, change)
    out.value("count", count)


@program(stages=(2,), ranks=(2,))
def counted_by_itertools(smp: Any, out: Any) -> None:
    """next(itertools.count()) within a partial."""

    def change(numbers: Any, x: Tensor) -> Tensor:
        return x / next(numbers)

    trained(smp, out, functools.partial(change, itertools.count(1)))


@program(stages=(2,), ranks=(2,))
def counted_by_a_generator(smp: Any, out: Any) -> None:
    """A generator object that receives tensors' factors by next()."""

    def factors() -> Any:
        value = 1.0
        while True:
            yield value
            value *= 0.9

    source = factors()
    trained(smp, out, lambda x: x * next(source))


@program(stages=(2,), ranks=(2,))
def counted_by_a_default_argument(smp: Any, out: Any) -> None:
    """A list as default argument grows."""

    def change(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return x / len(seen)

    trained(smp, out, change)


@program(stages=(2,), ranks=(2,))
def counted_by_a_function_attribute(smp: Any, out: Any) -> None:
    """A function's own attribute counts."""

    def change(x: Tensor) -> Tensor:
        change.count += 1  # type: ignore[attr-defined]
        return x / change.count  # type: ignore[attr-defined]

    change.count = 0  # type: ignore[attr-defined]
    trained(smp, out, change)
    out.value("count", change.count)  # type: ignore[attr-defined]


@program(stages=(2,), ranks=(2,))
def counted_by_a_decorator(smp: Any, out: Any) -> None:
    """A decorator with functools.wraps counts calls in the wrapper."""

    def counting(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(function)
        def run(x: Tensor) -> Tensor:
            run.calls += 1  # type: ignore[attr-defined]
            return function(x) / run.calls  # type: ignore[attr-defined]

        run.calls = 0  # type: ignore[attr-defined]
        return run

    trained(smp, out, counting(torch.sin))


@program(stages=(2,), ranks=(2,))
def factor_in_a_function_class(smp: Any, out: Any) -> None:
    """An autograd function's backward reads a class attribute that the loop changes between steps."""

    class Scale(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * Scale.factor

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * Scale.factor * 0.5

    net = Net()
    net.blocks = nn.ModuleList(Half(Scale.apply) for _ in range(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        Scale.factor *= 0.8
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train(model, x, y).reduce_mean())
        optimizer.step()
        Scale.factor += 0.3
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def evaluated_on_replicas(smp: Any, out: Any) -> None:
    """Each replica evaluates after each step with batch norm's statistics, which are the first one's."""
    net = NormNet()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.3))
    step = make_step(smp)

    @smp.step
    def evaluate(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    for x, y in batches(smp):
        model.train()
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        model.eval()
        out.value("evaluated", evaluate(model, x, y).reduce_mean())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="is on stage")
def momentum_read_and_written(smp: Any, out: Any) -> None:
    """Momentum buffers are scaled in place where they are found by .get(), and by .items() of the state."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        for p in model.parameters():
            buffer = optimizer.state[p].get("momentum_buffer")
            if buffer is not None and p.ndim > 1:
                buffer.mul_(0.5).add_(torch.randn(p.shape), alpha=0.001)
        for j, (_, state) in enumerate(optimizer.state.items()):
            state["momentum_buffer"].mul_(1 - 0.01 * j)
    out.model(model)
