"""Blocks read objects outside of the model, which the step function changes for each microbatch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained

REFUSED = "after a call was recorded that reads it"
FACTOR_1 = 1.0


def run(smp: Any, out: Any, scaled: Callable[[Tensor, int], Tensor], change: Callable[[], Any]) -> None:
    """``scaled`` is called by each block with its result and number."""

    class Kind(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            return scaled(super().forward(x), self.number)

    def step(model: Any, x: Tensor) -> Tensor:
        change()
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    trained(smp, out, nn.Sequential(*(Kind(i) for i in range(4))), step)


@program(stages=(2,), ranks=(2,))
def a_class_around_the_block(smp: Any, out: Any) -> None:
    """A registry in a variable of an enclosing function."""

    class Registry:
        table = {"factor": 1.0}  # noqa: RUF012

        @classmethod
        def get(cls, name: str) -> float:
            return cls.table[name]

    def change() -> None:
        Registry.table["factor"] *= 1.3

    run(smp, out, lambda x, i: x * Registry.get("factor"), change)


@program(stages=(2,), ranks=(2,))
def a_property_of_an_object_around(smp: Any, out: Any) -> None:
    class Settings:
        def __init__(self) -> None:
            self._half = 0.5

        @property
        def factor(self) -> float:
            return self._half * 2

    settings = Settings()

    def change() -> None:
        settings._half *= 1.1

    run(smp, out, lambda x, i: x * settings.factor, change)


@program(stages=(2,), ranks=(2,))
def attributes_by_computed_names(smp: Any, out: Any) -> None:
    settings = SimpleNamespace(factor_0=1.0, factor_1=1.0, factor_2=1.0, factor_3=1.0)

    def change() -> None:
        settings.factor_1 *= 1.3
        settings.factor_3 *= 0.8

    run(smp, out, lambda x, i: x * getattr(settings, f"factor_{i}"), change)


@program(stages=(2,), ranks=(2,))
def all_attributes_at_once(smp: Any, out: Any) -> None:
    settings = SimpleNamespace(first=0.5, second=0.5)

    def change() -> None:
        settings.second *= 1.1

    run(smp, out, lambda x, i: x * sum(vars(settings).values()), change)


@program(stages=(2,), ranks=(2,))
def entries_by_computed_keys(smp: Any, out: Any) -> None:
    settings = {"factors": {f"block {i}": 1.0 for i in range(4)}, "other": [object()]}

    def change() -> None:
        settings["factors"]["block 1"] *= 1.3
        settings["other"].append(object())

    run(smp, out, lambda x, i: x * settings["factors"][f"block {i}"], change)


@program(stages=(2,), refused=REFUSED)
def globals_by_computed_names(smp: Any, out: Any) -> None:
    def change() -> None:
        globals()["FACTOR_1"] *= 1.3

    try:
        run(smp, out, lambda x, i: x * globals()[f"FACTOR_{min(i, 1) or 1}"], change)
    finally:
        globals()["FACTOR_1"] = 1.0


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def deep_in_a_configuration(smp: Any, out: Any) -> None:
    inner = SimpleNamespace(factor=1.0)
    settings = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=inner))))

    def change() -> None:
        inner.factor *= 1.3

    run(smp, out, lambda x, i: x * settings.a.b.c.d.factor, change)


@program(stages=(2,), refused=REFUSED)
def a_list_of_objects(smp: Any, out: Any) -> None:
    settings = [SimpleNamespace(factor=1.0) for _ in range(4)]

    def change() -> None:
        settings[1].factor *= 1.3

    run(smp, out, lambda x, i: x * settings[i].factor, change)


@program(stages=(2,), refused=REFUSED)
def a_list_of_dicts(smp: Any, out: Any) -> None:
    settings = {"blocks": [{"factor": 1.0} for _ in range(4)]}

    def change() -> None:
        settings["blocks"][1]["factor"] *= 1.3

    run(smp, out, lambda x, i: x * settings["blocks"][i]["factor"], change)


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def a_tensor_is_changed_in_place(smp: Any, out: Any) -> None:
    offset = torch.ones(6)
    run(smp, out, lambda x, i: x + offset, lambda: [offset.mul_(1.1)])


@program(stages=(2,), ranks=(2,))
def a_tensor_is_changed_in_place_between_steps(smp: Any, out: Any) -> None:
    """What it is when a step begins counts."""
    offset = torch.ones(6)

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + offset

    net = nn.Sequential(*(Kind() for _ in range(4)))
    trained(smp, out, net, steps=3, after_step=lambda: offset.mul_(1.1))


@program(stages=(2,))
def a_tensor_is_bound_anew(smp: Any, out: Any) -> None:
    settings = SimpleNamespace(offset=torch.ones(6))

    def change() -> None:
        settings.offset = settings.offset * 1.1

    run(smp, out, lambda x, i: x + settings.offset, change)


@program(stages=(2,), refused=REFUSED)
def a_tensor_in_a_list(smp: Any, out: Any) -> None:
    offsets = [torch.ones(6) for _ in range(4)]
    run(smp, out, lambda x, i: x + offsets[i], lambda: [offsets[1].mul_(1.1)])


def grows(factors: Any, place: int) -> Callable[[], None]:
    """Changes one of many."""

    def change() -> None:
        factors[place] *= 1.1

    return change


@program(stages=(2,), refused=REFUSED)
def a_large_array(smp: Any, out: Any) -> None:
    factors = np.ones(100_000)
    run(smp, out, lambda x, i: x * float(factors[i]), grows(factors, 3))


@program(stages=(2,), refused=REFUSED)
def a_long_list(smp: Any, out: Any) -> None:
    factors = [1.0] * 100
    run(smp, out, lambda x, i: x * factors[70 + i], grows(factors, 71))


@program(stages=(2,), refused=REFUSED)
def a_deque(smp: Any, out: Any) -> None:
    factors = deque([1.0, 2.0])

    def change() -> None:
        factors[1] *= 1.1

    run(smp, out, lambda x, i: x * factors[1], change)


@program(stages=(2,), refused=REFUSED)
def slots(smp: Any, out: Any) -> None:
    class Settings:
        __slots__ = ("factor",)

    settings = Settings()
    settings.factor = 1.0

    def change() -> None:
        settings.factor *= 1.1

    run(smp, out, lambda x, i: x * settings.factor, change)


@program(stages=(2,), refused=REFUSED)
def a_hook_reads_a_list_of_objects(smp: Any, out: Any) -> None:
    """Which the step function changes after its backward."""
    settings = [SimpleNamespace(factor=1.0)]
    net = nn.Sequential(*(Block() for _ in range(4)))
    net[0].linear.weight.register_hook(lambda gradient: gradient * settings[0].factor)

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        settings[0].factor *= 1.3
        return loss

    trained(smp, out, net, step)


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0


def grown(settings: Settings) -> None:
    settings.factor *= 1.1


@program(stages=(2,), ranks=(2,))
def a_module_that_is_not_the_models(smp: Any, out: Any) -> None:
    settings = Settings()
    run(smp, out, lambda x, i: x * settings.factor, lambda: grown(settings))


@program(stages=(2,), ranks=(2,))
def a_module_in_a_list(smp: Any, out: Any) -> None:
    settings = [Settings()]
    run(smp, out, lambda x, i: x * settings[0].factor, lambda: grown(settings[0]))


@program(stages=(2,), ranks=(2,))
def another_module_of_the_model(smp: Any, out: Any) -> None:
    """The container sets its attribute between the blocks, which hold it in a list, or get it."""

    class Kind(Block):
        def __init__(self, settings: Settings) -> None:
            super().__init__()
            self.held = [settings]

        def forward(self, x: Tensor, given: Settings) -> Tensor:  # type: ignore[override]
            return super().forward(x) * self.held[0].factor / given.factor**0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()
            self.blocks = nn.ModuleList(Kind(self.settings) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            self.settings.factor = 1.0
            for block in self.blocks:
                x = block(x, self.settings)
                grown(self.settings)
            return x

    trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def a_partial_and_a_default(smp: Any, out: Any) -> None:
    settings = {"factor": 1.0}

    def first(held: dict[str, float], x: Tensor) -> Tensor:
        return x * held["factor"]

    def second(x: Tensor, i: int, held: dict[str, float] = settings) -> Tensor:
        return partial(first, held)(x) * held["factor"]

    def change() -> None:
        settings["factor"] *= 1.1

    run(smp, out, second, change)


@program(stages=(2,), ranks=(2,))
def a_module_that_is_given(smp: Any, out: Any) -> None:
    class Kind(Block):
        def forward(self, x: Tensor, given: Settings) -> Tensor:  # type: ignore[override]
            return super().forward(x) * given.factor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()
            self.blocks = nn.ModuleList(Kind() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, self.settings)
                grown(self.settings)
            return x

    trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def a_partial_that_a_block_holds(smp: Any, out: Any) -> None:
    settings = {"factor": 1.0}

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = partial(by_factor, settings)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(super().forward(x))

    def step(model: Any, x: Tensor) -> Tensor:
        settings["factor"] *= 1.1
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    trained(smp, out, nn.Sequential(*(Kind() for _ in range(4))), step)


def by_factor(settings: dict[str, float], x: Tensor) -> Tensor:
    return x * settings["factor"]


@program(stages=(2,), ranks=(2,))
def an_attribute_of_a_function(smp: Any, out: Any) -> None:
    def scaled(x: Tensor, i: int) -> Tensor:
        return x * scaled.factor  # type: ignore[attr-defined]

    def change() -> None:
        scaled.factor *= 1.1  # type: ignore[attr-defined]

    scaled.factor = 1.0  # type: ignore[attr-defined]
    run(smp, out, scaled, change)


@program(stages=(2,), refused=REFUSED)
def a_cache_is_cleared(smp: Any, out: Any) -> None:
    settings = {"factor": 1.0}

    @lru_cache
    def factor(i: int) -> float:
        return settings["factor"]

    def change() -> None:
        settings["factor"] *= 1.1
        factor.cache_clear()

    run(smp, out, lambda x, i: x * factor(0), change)


def activation(x: Tensor) -> Tensor:
    return torch.tanh(x)


@program(stages=(2,), ranks=(2,))
def a_global_function_is_exchanged(smp: Any, out: Any) -> None:
    first = activation

    def change() -> None:
        globals()["activation"] = torch.sigmoid if activation is first else first

    try:
        run(smp, out, scaled_globally, change)
    finally:
        globals()["activation"] = first


def scaled_globally(x: Tensor, i: int) -> Tensor:
    return activation(x)


@program(stages=(2,), refused=REFUSED)
def environment_variables(smp: Any, out: Any) -> None:
    def change() -> None:
        os.environ["SMP_LITE_TEST_FACTOR"] = str(float(os.environ["SMP_LITE_TEST_FACTOR"]) * 1.1)

    os.environ["SMP_LITE_TEST_FACTOR"] = "1"
    try:
        run(smp, out, lambda x, i: x * float(os.environ["SMP_LITE_TEST_FACTOR"]), change)
    finally:
        del os.environ["SMP_LITE_TEST_FACTOR"]


class Scaled(nn.Module):
    """Container code multiplies by an ordinary tensor."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.factor
        return x


def changing(change: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def step(model: Any, x: Tensor) -> Tensor:
        change()
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return step


@program(stages=(2,), ranks=(2,))
def a_tensor_of_the_container_is_changed_in_place(smp: Any, out: Any) -> None:
    """Before each microbatch, when the last one's calls have not run."""
    factor = torch.ones(6)
    trained(smp, out, Scaled(factor), changing(lambda: factor.mul_(1.1)))


@program(stages=(2,), ranks=(2,))
def a_tensor_of_the_container_is_changed_by_data(smp: Any, out: Any) -> None:
    factor = torch.ones(6)
    trained(smp, out, Scaled(factor), changing(lambda: factor.data.mul_(1.1)))


@program(stages=(2,), ranks=(2,))
def a_tensor_of_the_container_is_changed_by_numpy(smp: Any, out: Any) -> None:
    array = np.ones(6, dtype=np.float32)

    def change() -> None:
        array[:] *= 1.1

    trained(smp, out, Scaled(torch.from_numpy(array)), changing(change))


@program(stages=(2,), ranks=(2,))
def a_buffer_is_changed_by_numpy(smp: Any, out: Any) -> None:
    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    net = nn.Sequential(*(Kind() for _ in range(4)))

    def change() -> None:
        net[1].factor.numpy()[:] *= 1.1

    trained(smp, out, net, changing(change))


@program(stages=(2,), refused=REFUSED)
def an_array_of_megabytes(smp: Any, out: Any) -> None:
    factors = np.ones(1_000_000)
    run(smp, out, lambda x, i: x * float(factors[i]), grows(factors, 3))


@program(stages=(2,), refused=REFUSED)
def a_list_of_thousands(smp: Any, out: Any) -> None:
    factors = [1.0] * 10_000
    run(smp, out, lambda x, i: x * factors[9_000 + i], grows(factors, 9_003))


@program(stages=(2,))
def a_tensor_that_the_container_holds_as_numpy_too(smp: Any, out: Any) -> None:
    """Its own forward, all of it, could run as one call, but for what it leaves behind."""
    offset = torch.ones(6)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            array = offset.numpy()
            for block in self.blocks:
                x = block(x) + offset
                array *= 1.1
            return x

    trained(smp, out, Net())


@program(stages=(2,), refused=REFUSED)
def a_tensor_shared_with_numpy(smp: Any, out: Any) -> None:
    array = np.ones(6, dtype=np.float32)
    offset = torch.from_numpy(array)

    def change() -> None:
        array[:] *= 1.1

    run(smp, out, lambda x, i: x + offset, change)
