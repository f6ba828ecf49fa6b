"""Gradients that the user's code gives, or gives none of, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.errors import SMPError
from tests.models.layers import WIDTH
from tests.transparency.conftest import OpenSession


class _NoneForTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 0.5 + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _NoneForTheFirst.apply(x, self.linear(x.detach()))


@pytest.mark.parametrize("num_microbatches", [2, 3, 7])
def test_backward_of_an_output_with_its_gradient(num_microbatches: int, open_session: OpenSession) -> None:
    """One process divides the output by the number of microbatches."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(module)
    x, gradient = torch.randn(2 * num_microbatches, WIDTH), torch.randn(2, WIDTH)
    for part in x.chunk(num_microbatches):
        (plain(part) / num_microbatches).backward(gradient)
    open_session(2, microbatches=num_microbatches, auto_partition=False, default_partition=0)
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        model.backward(output, gradient)
        return output

    step(model, x)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("gradient", "what"),
    [
        (torch.ones(WIDTH), r"has shape \(\d+,\), what it is of \(2, \d+\)"),
        (torch.ones(3, 2, WIDTH), r"has shape \(3, 2, \d+\), what it is of \(2, \d+\)"),
        (torch.ones(2, WIDTH, dtype=torch.complex64), "is torch.complex64, what it is of torch.float32"),
    ],
    ids=["expandable", "sum", "complex"],
)
def test_a_gradient_of_another_shape_is_refused(
    gradient: Tensor, what: str, open_session: OpenSession
) -> None:
    """As by ``torch.autograd.backward``; its engine alone would make it fit."""
    open_session(2, microbatches=2)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x), gradient)

    with pytest.raises(SMPError, match=what):
        step(model, torch.randn(4, WIDTH))


def test_a_gradient_that_has_another_shape_in_a_replay_is_refused(open_session: OpenSession) -> None:
    open_session(2, microbatches=2, static_mode=True)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    gradient = torch.ones(2, WIDTH)

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x), gradient)

    x = torch.randn(4, WIDTH)
    for _ in range(3):
        step(model, x)
    gradient.data = torch.ones(WIDTH)
    with pytest.raises(SMPError, match="a gradient has shape"):
        step(model, x)


def test_no_gradient_for_a_value_of_another_stage_is_refused(open_session: OpenSession) -> None:
    """In one process what comes before it gets none; zeros would be decayed and averaged."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Block())
    open_session(2, auto_partition=False, default_partition=0)
    model = smp.DistributedModel(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    with pytest.raises(SMPError, match="gives None for a value that another stage"):
        step(model, torch.randn(4, WIDTH))
