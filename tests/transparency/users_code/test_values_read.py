"""What a block's code reads, and the step function sets anew for each microbatch.

The block runs with what was there when it was called, wherever Python keeps it.
"""

from __future__ import annotations

import array
import copy
import math
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.models.layers import WIDTH
from tests.transparency.conftest import OpenSession

FACTOR = 1.0


def _function() -> None:
    """Holds a number."""


_function.factor = 1.0  # type: ignore[attr-defined]


class _Held:
    factor = 1.0


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held = _Held()
        self.reference = weakref.ref(self.held)
        self.bytes = bytearray(b"\x01")
        self.array = array.array("d", [1.0])
        self.behind = {"factor": 1.0}
        self.shown = types.MappingProxyType(self.behind)


class _Weak(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.reference().factor  # type: ignore[union-attr]

    def put(self, factor: int) -> None:
        self.held.factor = float(factor)


class _Bytes(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.bytes[0]

    def put(self, factor: int) -> None:
        self.bytes[0] = factor


class _Array(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.array[0]

    def put(self, factor: int) -> None:
        self.array[0] = factor


class _Shown(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.shown["factor"]

    def put(self, factor: int) -> None:
        self.behind["factor"] = float(factor)


class _OfAFunction(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * _function.factor  # type: ignore[attr-defined]

    def put(self, factor: int) -> None:
        _function.factor = float(factor)  # type: ignore[attr-defined]


def _default(factor: float = 1.0, *, other: float = 1.0) -> float:
    return factor * other


class _OfDefaults(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * _default()

    def put(self, factor: int) -> None:
        _default.__defaults__ = (float(factor),)


class _OfKeywordDefaults(_OfDefaults):
    def put(self, factor: int) -> None:
        _default.__kwdefaults__["other"] = float(factor)


class _OfAModule(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * sys.modules["tests.transparency.users_code.test_values_read"].FACTOR

    def put(self, factor: int) -> None:
        global FACTOR
        FACTOR = float(factor)


@pytest.mark.parametrize(
    "kind", [_Weak, _Bytes, _Array, _Shown, _OfAFunction, _OfDefaults, _OfKeywordDefaults, _OfAModule]
)
def test_each_microbatch_has_its_own(kind: Any, open_session: OpenSession) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(kind(), kind())

    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    plain, expected = build(), []
    for number, row in enumerate(x.split(1), start=1):
        for block in plain:
            block.put(number)
        expected.append(float(plain(row).square().mean()))
    module = build()
    for block in module:
        block.put(1)
    open_session(2)
    model = smp.DistributedModel(module)
    calls = 0

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        for block in module:
            block.put(calls)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    assert [float(loss) for loss in step(model, x).outputs] == expected


ZERO = 0.0
ZEROS = [0.0]


class _SignOfAGlobal(_Block):
    """Where 0.0 is another number than -0.0."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * math.copysign(1.0, ZERO)

    def put(self, number: int) -> None:
        global ZERO
        ZERO = -0.0 if number % 2 else 0.0


class _SignInAList(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * math.copysign(1.0, ZEROS[0])

    def put(self, number: int) -> None:
        ZEROS[0] = -0.0 if number % 2 else 0.0


class _SignOfAnAttribute(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * math.copysign(1.0, self.held.factor)

    def put(self, number: int) -> None:
        self.held.factor = -0.0 if number % 2 else 0.0


def assert_losses(module: nn.Module, last: nn.Module, x: Tensor, expected: list[float]) -> None:
    """In the open session, with ``last`` on a second stage: the losses of two steps, by microbatch."""
    model = smp.DistributedModel(module)
    smp.set_partition(last, 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        assert [float(loss) for loss in step(model, x).outputs] == expected


@pytest.mark.parametrize("kind", [_SignOfAGlobal, _SignInAList, _SignOfAnAttribute])
def test_zeros_have_signs(kind: Any, open_session: OpenSession) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(kind(), kind())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    first, second = module
    expected = []
    for row in x.split(1):
        first.put(1)
        y = first(row)
        first.put(2)
        expected.append(float((y + second(row)).mean()))
    open_session(2, auto_partition=False, default_partition=0)
    assert_losses(_Both(module, first.put), second, x, expected)


class _HandsBack(_Block):
    """Another value of an argument comes back as it is."""

    def forward(self, x: Tensor, sign: float | complex) -> tuple[Tensor, float | complex]:
        return self.linear(x), sign


class _AsksTwice(nn.Module):
    def __init__(self, zero: float | complex) -> None:
        super().__init__()
        self.block, self.last, self.zero = _HandsBack(), _Block().linear, zero

    def forward(self, x: Tensor) -> Tensor:
        y, plus = self.block(x, self.zero)
        z, minus = self.block(x, -self.zero)
        parts = [complex(plus).real, complex(minus).real]
        return self.last(y + z) * sum(k * math.copysign(1.0, part) for k, part in enumerate(parts, 1))


@pytest.mark.parametrize("zero", [0.0, complex(0.0, 0.0)])
def test_arguments_that_are_zeros_have_signs(zero: float | complex, open_session: OpenSession) -> None:
    torch.manual_seed(0)
    module = _AsksTwice(zero)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = [float(module(row).mean()) for row in x.split(1)]
    open_session(2, auto_partition=False, default_partition=0)
    assert_losses(module, module.last, x, expected)


class _Both(nn.Module):
    """Sets something anew between the calls of two blocks."""

    def __init__(self, blocks: nn.Sequential, put: Any) -> None:
        super().__init__()
        self.blocks, self.put = blocks, put

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        self.put(1)
        y = first(x)
        self.put(2)
        return y + second(x)


class _Forgotten(nn.Module):
    """Another stage reads a view that nobody here holds any more when its memory changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.far, self.near = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + x
        far = self.far(x.detach() * 1.0) + self.far(x.detach())
        x.mul_(2.0)
        return self.near(x) + far.detach()


def test_a_view_that_is_forgotten_is_read_as_it_was(open_session: OpenSession) -> None:
    open_session(2, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    plain = _Forgotten()
    module = copy.deepcopy(plain)
    model = smp.DistributedModel(module)
    smp.set_partition(module.far, 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = [float(plain(part).square().mean()) for part in x.chunk(4)]
    for _ in range(2):
        assert [float(loss) for loss in step(model, x).outputs] == expected
