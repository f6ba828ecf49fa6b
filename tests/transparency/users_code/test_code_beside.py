"""Code of modules that looks at gradients, nodes of autograd and layers beside its own business.

Whatever it does is what one process does, to the bit, under schedules that split backwards too, or it is
refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp

WIDTH, ROWS, STEPS, FROM = 4, 2, 8, 5


class _Block(nn.Module):
    """From step ``FROM`` on its flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.made = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("factor", torch.ones(()))
        self.is_on = False

    def inner(self, x: Tensor) -> Tensor:
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.inner(x)))


class _OtherWeight(_Block):
    """A weight that is made stands in the layer for a call."""

    def inner(self, x: Tensor) -> Tensor:
        if self.is_on:
            return torch.func.functional_call(self.first, {"weight": self.made.tanh()}, x)
        return self.first(x) + self.made.sum()


class _NodeHook(_Block):
    def inner(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.grad_fn is not None:
            scale = 2.0 if self.is_on else 1.0
            y.grad_fn.register_prehook(lambda gradients: (gradients[0] * scale,))
        return y


class _AsksForGradient(_Block):
    """What a split layer would keep from ``autograd.grad``."""

    def inner(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.is_on and y.requires_grad:
            (slope,) = torch.autograd.grad(y.sum(), self.first.weight, retain_graph=True, allow_unused=True)
            y = y * (1.0 if slope is None else 1 + slope.abs().mean().detach())
        return y


class _SeesTheNode(_Block):
    def inner(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y * (2.0 if hasattr(y.grad_fn, "_saved_mat1") else 1.0)


class _ReadsGradient(_Block):
    def inner(self, x: Tensor) -> Tensor:
        y = self.first(x)
        gradient = self.first.weight.grad
        return y if gradient is None else y * (1 + gradient.abs().mean())


class _HookReadsBuffer(_Block):
    def inner(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        self.factor.mul_(1.1)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.factor)
        return y


class _Net(nn.Module):
    def __init__(self, kind: type[_Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _train(kind: type[_Block], microbatches: int = 3, **parameters: Any) -> None:
    """Raises where training is not that of plain torch."""
    smp.init_in_memory(
        {
            "partitions": 2,
            "microbatches": microbatches,
            "auto_partition": False,
            "default_partition": 0,
            **parameters,
        }
    )
    torch.manual_seed(0)
    plain = _Net(kind)
    ours = copy.deepcopy(plain)
    for number, block in enumerate(ours.blocks):
        smp.set_partition(block, number % 2)
    model = smp.DistributedModel(ours, average_grads_across_microbatches=False)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x = torch.randn(microbatches * ROWS, WIDTH, generator=generator)
        for block in (*plain.blocks, *ours.blocks):
            block.is_on = number >= FROM
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        expected = []
        for part in x.chunk(microbatches):
            loss = plain(part).square().mean()
            loss.backward()
            expected.append(float(loss))
        assert [float(loss) for loss in step(model, x).outputs] == expected, number
        optimizer.step()
        plain_optimizer.step()
        for (key, value), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, other), (number, key)


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("static_mode", [False, True])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize("kind", [_OtherWeight, _NodeHook, _AsksForGradient, _SeesTheNode])
def test_it_is_what_one_process_does(kind: type[_Block], pipeline: str, static_mode: bool) -> None:
    _train(kind, pipeline=pipeline, static_mode=static_mode)


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            _ReadsGradient,
            "the gradient of the parameter .* is read or set at .*, in a forward",
        ),
        (_HookReadsBuffer, "the buffer 'blocks.*factor' is read at .*, in code that runs within a backward"),
    ],
)
def test_what_comes_too_early_or_late_is_refused(kind: type[_Block], text: str, pipeline: str) -> None:
    with pytest.raises(smp.SMPError, match=text):
        _train(kind, pipeline=pipeline)


@pytest.mark.parametrize("kind", [_ReadsGradient, _HookReadsBuffer])
def test_with_one_microbatch_it_is_not(kind: type[_Block]) -> None:
    _train(kind, microbatches=1)
