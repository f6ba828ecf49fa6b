"""Modes of the script's that see every torch function, on around whole steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import smp_lite as smp
from tests.models.layers import WIDTH, MLPBlock
from tests.transparency.conftest import OpenSession

ROWS = 3
MICROBATCHES = 2


class Scaling(TorchFunctionMode):
    """Changes what functions give, so that one more look at a call is another result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func in SCALED else result


SCALED = (
    F.gelu,
    F.mse_loss,
    F.linear,
    torch.tanh,
    torch.add,
    Tensor.mm,
    Tensor.add_,
    Tensor.mul_,
    torch.zeros,
)
"""Also what the library might compute with."""


class Shifting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 0.25 if func is torch.ops.aten.tanh.default else result


class Cubed(torch.autograd.Function):
    """Code of the script that runs when the step is executed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.add(x * x * x, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (3 * x * x + 1)


class Recomputed(nn.Module):
    """Its backward calls functions again, where one process's mode is off: it sees ``loss.backward()``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLPBlock(), Recomputed()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.125)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(F.gelu(self.first(x)), x)
        x = Cubed.apply(F.linear(self.second(x), self.weight))
        return x + F.dropout(torch.ones_like(x), 0.0) + torch.zeros(WIDTH)


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    """Which is a mode, too; with a function of torch's that the script has put one of its own around."""
    own = F.mse_loss
    with (
        torch.get_default_device(),
        mock.patch.object(F, "mse_loss", lambda *args, **kwargs: own(*args, **kwargs) * 1.5),
    ):
        yield


@contextlib.contextmanager
def _two() -> Iterator[None]:
    with torch.get_default_device(), Scaling():
        yield


MODES = {"function": Scaling, "dispatch": Shifting, "device": _default_device, "two": _two}


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("config", [{}, {"pipeline": "zero_bubble"}, {"static_mode": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_is_seen_once(mode: str, config: dict[str, Any], open_session: OpenSession) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    open_session(2, **{**config, "microbatches": MICROBATCHES})
    model = smp.DistributedModel(net)

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(torch.tanh(model(x)), target)
        model.backward(loss)
        return loss

    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain))
    for number in range(4):
        x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        target = x.flip(0)
        with MODES[mode]():
            found = step(model, x, target).outputs
            wanted = []
            for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
                loss = F.mse_loss(torch.tanh(plain(part)), goal)
                (loss / MICROBATCHES).backward()
                wanted.append(loss.detach())
        assert [float(loss) for loss in found] == [float(loss) for loss in wanted], f"step {number}"
        for (name, one), other in zip(net.named_parameters(), plain.parameters()):
            assert torch.equal(one.grad, other.grad), f"step {number}: {name}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_a_mode_that_begins_within_the_step(open_session: OpenSession) -> None:
    """A number is asked for under it: what was recorded before runs now, as it would have without it."""
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    open_session(2, microbatches=MICROBATCHES)
    model = smp.DistributedModel(net)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        with Scaling():
            scale = 1.0 if float(torch.tanh(y.detach()).sum()) > 0 else 2.0
        return y.square().mean() * scale

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    for mode in (contextlib.nullcontext, Scaling):
        with mode():
            found = [float(loss) for loss in step(model, x).outputs]
            assert found == [float(loss_of(plain, part)) for part in x.chunk(MICROBATCHES)]
