"""What a block's code reads, and the step function sets anew for each microbatch.

The block runs with what was there when it was called, wherever Python keeps it.
"""

from __future__ import annotations

import array
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


class _OfAModule(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * sys.modules["tests.transparency.test_values_read"].FACTOR

    def put(self, factor: int) -> None:
        global FACTOR
        FACTOR = float(factor)


@pytest.mark.parametrize("kind", [_Weak, _Bytes, _Array, _Shown, _OfAFunction, _OfAModule])
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
