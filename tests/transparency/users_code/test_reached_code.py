"""Code that is reached in roundabout ways: helpers in closures, methods of a trainer, callables in C,
``__call__`` of a class, generators, classes of tensors, transformations.

Equal to one process to the bit, or refused by name.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp

WIDTH, ROWS, MICROBATCHES, STEPS = 4, 8, 4, 6
Step = Callable[..., Any]

# What a step function reads through others, and is changed between steps ------------------------------------


def _closure(change: list[float]) -> Step:
    def factor() -> float:
        return change[0]

    def step(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * factor()
        model.backward(loss)
        return loss

    return step


def _two_closures(change: list[float]) -> Step:
    def weighted(y: Tensor) -> Tensor:
        return y.square().mean() * change[0]

    def work(model: Any, x: Tensor) -> Tensor:
        loss = weighted(model(x))
        model.backward(loss)
        return loss

    return lambda model, x: work(model, x)


class _Trainer:
    def __init__(self, change: list[float]) -> None:
        self.change = change

    @property
    def weight(self) -> float:
        return self.change[0]

    def loss(self, y: Tensor) -> Tensor:
        return y.square().mean() * self.weight

    def step(self, model: Any, x: Tensor) -> Tensor:
        loss = self.loss(model(x))
        model.backward(loss)
        return loss


def _attrgetter(change: list[float]) -> Step:
    first = operator.itemgetter(0)
    holder = types.SimpleNamespace(change=change)
    of = operator.attrgetter("change")

    def step(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * first(of(holder))
        model.backward(loss)
        return loss

    return step


# Random numbers of the step's own


def _fresh_generator(change: list[float]) -> Step:
    def step(model: Any, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        y = model(x + noise)
        loss: Tensor = (
            (y + torch.empty_like(y).normal_(generator=torch.Generator().manual_seed(4))).square().mean()
        )
        model.backward(loss)
        return loss

    return step


def _forked(change: list[float]) -> Step:
    def step(model: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.rand(x.shape)
        loss: Tensor = model(x + noise).square().mean()
        model.backward(loss)
        return loss

    return step


STEPS_OF: dict[str, Callable[[list[float]], Step]] = {
    "a closure": _closure,
    "closures": _two_closures,
    "a method": lambda change: _Trainer(change).step,
    "an attrgetter": _attrgetter,
    "a generator made anew": _fresh_generator,
    "a forked generator": _forked,
}


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]


class _Plain:
    """The model in one process: a microbatch's gradients count their share."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        (loss / MICROBATCHES).backward()


def _plainly(net: nn.Module, step: Step, change: list[float]) -> list[list[float]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for number, batch in enumerate(_batches()):
        change[0] = 1.0 + number
        optimizer.zero_grad()
        losses.append([step(_Plain(net), x).item() for x in batch.chunk(MICROBATCHES)])
        optimizer.step()
    return losses


def _on_stages(net: nn.Module, step: Step, change: list[float], **config: Any) -> list[list[float]]:
    smp.init_in_memory({"partitions": 2, "microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    decorated = smp.step(step)
    losses = []
    for number, batch in enumerate(_batches()):
        change[0] = 1.0 + number
        optimizer.zero_grad()
        losses.append([loss.item() for loss in decorated(model, batch).outputs])
        optimizer.step()
    return losses


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", STEPS_OF)
def test_a_step_reads_through_others(name: str, static: bool) -> None:
    change = [1.0]
    expected = _plainly(_seeded(_layers), STEPS_OF[name](change), change)
    found = _on_stages(_seeded(_layers), STEPS_OF[name](change), change, static_mode=static)
    assert found == expected
    assert len({str(step) for step in expected}) == STEPS


# Models -----------------------------------------------------------------------------------------------------


class _Around(nn.Module):
    """What its class does around torch's ``__call__``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = super().__call__(x * 2) + x
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class _Yields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.layer(x)
        yield x * 2


class _TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(WIDTH, WIDTH), _Yields(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.pair(self.first(x))
        found: Tensor = self.last(y) + z
        return found


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda z: (z * self.weight).sin().sum()))(x)


HELD = {"rate": 1.0}
HOLDER = types.SimpleNamespace(rate=1.0)
GETTERS: dict[str, Callable[[], float]] = {
    "get": partial(HELD.get, "rate"),  # type: ignore[arg-type]
    "getattr": partial(getattr, HOLDER, "rate"),
    "attrgetter": partial(operator.attrgetter("rate"), HOLDER),
}


class _Reads(nn.Module):
    """Its calls run later than the container changes what they read."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), GETTERS[way]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.way()
        return found


class _Sets(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Reads(way) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            HELD["rate"] = HOLDER.rate = 1.0 + number
            x = block(x)
        HELD["rate"] = HOLDER.rate = 9.0
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a __call__ of its own": lambda: nn.Sequential(_Around(), _Around()),
    "a generator": _TakesTwo,
    "torch.func.grad": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), _Slope(), nn.Linear(WIDTH, WIDTH)),
    **{f"read by {way}": partial(_Sets, way) for way in GETTERS},
}


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("config", [{}, {"static_mode": True}, {"pipeline": "zero_bubble"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_modules_whose_calls_are_not_all_there_is(name: str, config: dict[str, Any]) -> None:
    change = [1.0]
    expected = _plainly(_seeded(MODELS[name]), _closure(change), change)
    if name == "a generator" and config.get("static_mode"):
        with pytest.raises(smp.SMPError, match="calls pair, which returns an iterator"):
            _on_stages(_seeded(MODELS[name]), _closure(change), change, **config)
        return
    assert _on_stages(_seeded(MODELS[name]), _closure(change), change, **config) == expected


class _Picture(Tensor):
    """A class of tensors."""


class _Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).as_subclass(_Picture)  # type: ignore[no-any-return]


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Makes(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = self.last(y * 2 if isinstance(y, _Picture) else y)
        return found


def test_a_class_of_tensors_is_not_lost_between_stages() -> None:
    with pytest.raises(smp.SMPError, match="a result is a _Picture, a class of tensors of the script's own"):
        _on_stages(_seeded(_Asks), _closure([1.0]), [1.0])


# Backward code ----------------------------------------------------------------------------------------------

RATES = {"rate": 1.0}


class _Rates:
    rate = 1.0

    def now(self) -> float:
        return _Rates.rate


def _rate() -> float:
    return RATES["rate"]


READ_BACKWARD: dict[str, Callable[[], float]] = {
    "a function": _rate,
    "a function of a function": lambda: _rate(),
    "a method": _Rates().now,
    "a method in C": partial(RATES.__getitem__, "rate"),
}


class _Hooked(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), READ_BACKWARD[way]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        way = self.way
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * way())
        return y


def _scaling(way: Callable[[], float]) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * way()

    return Scaled


class _Scaled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), _scaling(READ_BACKWARD[way])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(self.layer(x))
        return found


@pytest.mark.parametrize("kind", [_Hooked, _Scaled])
@pytest.mark.parametrize("way", READ_BACKWARD)
def test_backward_code_reads_through_others(way: str, kind: Callable[[str], nn.Module]) -> None:
    number = 0

    def step(model: Any, x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        RATES["rate"] = _Rates.rate = 1.0 + number % MICROBATCHES
        loss: Tensor = model(x).square().mean()
        model.backward(loss)
        RATES["rate"] = _Rates.rate = 9.0
        return loss

    def build() -> nn.Module:
        return nn.Sequential(kind(way), kind(way))

    expected = _plainly(_seeded(build), step, [0.0])
    number = 0
    assert _on_stages(_seeded(build), step, [0.0]) == expected


def test_a_helper_is_exchanged_between_microbatches() -> None:
    """For one of the same kind, which reads something else: what a hook reaches is looked up for each."""
    rates = {"once": 1.0, "twice": 1.0}
    holder: Any = types.SimpleNamespace(scaled=None)
    number = 0

    def once(gradient: Tensor) -> Tensor:
        return gradient * rates["once"]

    def twice(gradient: Tensor) -> Tensor:
        return gradient * rates["twice"] * 2

    def step(model: Any, x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        holder.scaled = once if number % 2 else twice
        rates["once"] = rates["twice"] = 1.0 + number % MICROBATCHES
        y = model(x)
        y.register_hook(lambda gradient: holder.scaled(gradient))
        loss: Tensor = y.square().mean()
        model.backward(loss)
        rates["once"] = rates["twice"] = 9.0
        return loss

    expected = _plainly(_seeded(_layers), step, [0.0])
    number = 0
    assert _on_stages(_seeded(_layers), step, [0.0]) == expected


@pytest.mark.ci
def test_helpers_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More functions that mention each other than Python can call one inside the other."""
    helpers = types.ModuleType("helpers_beside_the_script")
    helpers.__file__ = "/scripts/helpers_beside_the_script.py"
    lines = [f"def f{i}(g):\n    return f{i + 1}(g) if g is None else g * RATE" for i in range(2 * 1000)]
    exec("RATE = 1.0\n" + "\n".join(lines), vars(helpers))
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    first = vars(helpers)["f0"]

    def step(model: Any, x: Tensor) -> Tensor:
        helpers.RATE += 0.5  # type: ignore[attr-defined]
        y = model(x)
        y.register_hook(lambda gradient: first(gradient))
        loss: Tensor = y.square().mean()
        model.backward(loss)
        return loss

    expected = _plainly(_seeded(_layers), step, [1.0])
    helpers.RATE = 1.0  # type: ignore[attr-defined]
    assert _on_stages(_seeded(_layers), step, [1.0]) == expected


def test_a_parameter_that_is_none_may_be_registered() -> None:
    smp.init_in_memory({"partitions": 2, "microbatches": MICROBATCHES})
    net = _layers()
    model = smp.DistributedModel(net)
    step = smp.step(_closure([1.0]))
    step(model, _batches()[0])
    net[0].register_parameter("later", None)
    step(model, _batches()[0])
    net[0].register_parameter("other", nn.Parameter(torch.zeros(1)))
    with pytest.raises(smp.SMPError, match=r"the parameter '0\.other' was added to the model"):
        step(model, _batches()[0])
