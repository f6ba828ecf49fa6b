"""Gradients of parameters as actions of their own, where hooks listen: these see what they always see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp_lite.errors import SMPError
from tests.models.layers import WIDTH, Chain
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round
from tests.transparency.schedules.weight_gradients import (
    BATCH,
    Around,
    Check,
    all_but_norms,
    own_names,
    train,
    zigzag_step,
)


class Hooked(Chain):
    """Hooks on parameters and on what a linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].expand.weight.register_hook(lambda gradient: 2 * gradient)
        for block in self.blocks:
            block.contract.register_forward_hook(self._double)
        for parameter in self.blocks[1].parameters():
            parameter.register_post_accumulate_grad_hook(self._halve)

    @staticmethod
    def _double(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: 2 * gradient)

    @staticmethod
    def _halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)


def test_hooks_see_what_they_always_see(check: Check) -> None:
    found = check(Hooked)
    assert "blocks.0.expand.weight" not in found
    assert "blocks.1.expand.weight" not in found
    assert "blocks.2.expand.weight" in found


def test_a_hook_that_comes_later(check: Check) -> None:
    def hook(model: nn.Module) -> None:
        model.blocks[2].expand.weight.register_hook(lambda gradient: gradient * 3)

    rounds = [Round(train, BATCH), Round(train, BATCH), Round(train, BATCH, before=hook), Round(train, BATCH)]
    assert check(Chain, *rounds) == all_but_norms(Chain)


def test_hooks_on_the_node_that_accumulates(check: Check) -> None:
    """What optimizers of other libraries did before there were hooks on parameters."""
    kept: list[Any] = []

    def build() -> nn.Module:
        model = Chain()
        parameter = model.blocks[1].expand.weight
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def halve(*_: Any) -> None:
            parameter.grad.mul_(0.5)

        node.register_hook(halve)
        kept.append(node)
        return model

    assert "blocks.1.expand.weight" not in check(build)


class Looking(nn.Module):
    """A hook on the backward of a module looks at the gradients of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_full_backward_hook(self._double)

    @staticmethod
    def _double(module: nn.Module, *gradients: Any) -> None:
        if module.weight.grad is not None:
            module.weight.grad.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_hooks_on_backwards_of_modules(check: Check) -> None:
    check(lambda: Around(Looking))


class Counted(Chain):
    """Hooks on all gradients of a block count together, and what they do depends on it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            hook = self._counting()
            for parameter in block.parameters():
                parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def _counting() -> Callable[[Tensor], None]:
        state = [0]

        def hook(parameter: Tensor) -> None:
            state[0] += 1
            parameter.grad.mul_(1 + state[0] % 5)

        return hook


class Reading(Chain):
    """A hook reads the gradient of another layer, which comes before it in a backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        for block in self.blocks:
            if where == "parameter":
                block.norm.weight.register_post_accumulate_grad_hook(self._after(block.expand.weight))
            elif where == "module":
                block.norm.register_full_backward_hook(self._module(block.expand.weight))
            else:
                block.norm.register_forward_hook(self._output(block.expand.weight))

    @staticmethod
    def _factor(other: Tensor) -> Any:
        return 1 if other.grad is None else 1 + other.grad.abs().sum()

    def _after(self, other: Tensor) -> Callable[..., None]:
        def hook(parameter: Tensor) -> None:
            parameter.grad.mul_(self._factor(other))

        return hook

    def _module(self, other: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            return None if inputs[0] is None else (inputs[0] * self._factor(other),)

        return hook

    def _output(self, other: Tensor) -> Callable[..., None]:
        def put(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * self._factor(other))

        return put


@pytest.mark.parametrize(
    "build", [Counted, *[partial(Reading, w) for w in ("parameter", "module", "output")]]
)
def test_hooks_that_know_of_each_other(build: Callable[[], nn.Module], check: Check) -> None:
    found = check(build)
    assert "blocks.1.expand.weight" not in found
    assert "head.weight" in found


class HoldsMore(nn.Module):
    """A weight of its own, and a layer inside whose hook looks at gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_full_backward_hook(Looking._double)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.gelu(F.linear(x, self.weight)))


def test_hooks_on_a_module_within_one_that_is_split(check: Check) -> None:
    found = check(lambda: Around(HoldsMore))
    assert own_names(found) == {"weight"}


def test_a_hook_that_reads_later_is_an_error(open_session: OpenSession) -> None:
    open_session(2, "zigzag", pipeline="zero_bubble")
    module = Chain()
    _, step = zigzag_step(module)
    step(BATCH)
    step(BATCH)
    for block in module.blocks:
        weight = block.expand.weight
        block.norm.register_full_backward_hook(
            lambda module, inputs, outputs, weight=weight: (inputs[0] * weight.grad.abs().sum(),)
        )
    with pytest.raises(SMPError, match=r"expand\.weight' is read or set within a backward .*'interleaved'"):
        step(BATCH)
