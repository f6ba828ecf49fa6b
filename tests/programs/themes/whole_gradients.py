"""Hooks on gradients that arise in parts: of values used on several stages, of shared parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_full_backward_hook

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained

PARTS = "has hooks on its gradient, which arises in several parts here"
TWICE = "model.backward\\(\\) is called again in one microbatch"


def clamped(gradient: Tensor) -> Tensor:
    """Not linear, so that parts do not sum up to the whole."""
    return gradient.clamp(-1e-3, 1e-3)


class Blocks(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), *(kind() for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@program(stages=(2, 4), ranks=(2,))
def blocks_hook_what_they_are_given(smp: Any, out: Any) -> None:
    """Three blocks put a hook on the same value; all of them see the gradient of all its consumers."""

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
                x.register_hook(clamped)
            return super().forward(x)

    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[1](x) + self.blocks[2](x) + self.blocks[3](x) + x

    trained(smp, out, Net(Kind))


@program(stages=(2, 4), ranks=(2,))
def a_hook_comes_after_the_consumers(smp: Any, out: Any) -> None:
    """Three gradients of one value meet before the hook."""

    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            y = self.blocks[2](x)
            z = self.blocks[3](self.blocks[2](self.blocks[1](x)))
            x.register_hook(clamped)
            y.register_hook(clamped)
            return z + self.blocks[3](x) + y

    trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def a_hook_comes_after_a_look(smp: Any, out: Any) -> None:
    """The value has been computed by then."""

    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            y = self.blocks[2](x)
            if y.sum().item() > -100:
                x.register_hook(clamped)
                y.register_hook(clamped)
            return self.blocks[3](x) + y

    trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def handles_are_removed(smp: Any, out: Any) -> None:
    """One before the backward, which it then misses; one after it, too late."""
    handles: list[Any] = []

    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            handle = x.register_hook(lambda gradient: gradient * 3)
            handles.append(x.register_hook(clamped))
            x = self.blocks[3](self.blocks[2](self.blocks[1](x)))
            handle.remove()
            return x

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        handles.pop().remove()
        return loss

    trained(smp, out, Net(), step)


class Reused(Blocks):
    """The first block comes last once more, so its gradient arises twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().forward(x))


@program(stages=(2,), ranks=(2,), refused=PARTS)
def a_hook_on_a_reused_weight(smp: Any, out: Any) -> None:
    net = Reused()
    net.blocks[0].linear.weight.register_hook(clamped)
    trained(smp, out, net)


@program(stages=(2,), ranks=(2,), refused=PARTS)
def a_hook_after_a_reused_weights_accumulation(smp: Any, out: Any) -> None:
    def clamp(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    net = Reused()
    net.blocks[0].linear.weight.register_post_accumulate_grad_hook(clamp)
    trained(smp, out, net)


@program(stages=(2,), ranks=(2,), refused=PARTS)
def a_hook_on_a_tied_weight(smp: Any, out: Any) -> None:
    class Tied(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 6)
            self.head.weight = self.blocks[0].linear.weight
            self.head.weight.register_hook(clamped)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))

    trained(smp, out, Tied())


@program(stages=(2,))
def a_hook_on_a_weight_reused_side_by_side(smp: Any, out: Any) -> None:
    """Nothing lies between the two calls, so the hook sees the sum."""

    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.blocks[0](x))

    net = Net()
    net.blocks[0].linear.weight.register_hook(clamped)
    trained(smp, out, net)


@program(stages=(2,), ranks=(2,), refused=TWICE)
def two_backwards_and_a_hook(smp: Any, out: Any) -> None:
    net = Blocks()
    net.blocks[0].linear.weight.register_hook(clamped)

    def step(model: Any, x: Tensor) -> Tensor:
        first = model(x).square().mean()
        model.backward(first)
        second = model(x).abs().mean()
        model.backward(second)
        return first + second

    trained(smp, out, net, step)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return clamped(gradient)


class ClampedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Clamped.apply(super().forward(x))


@program(stages=(2,), refused=TWICE)
def two_backwards_through_one_function(smp: Any, out: Any) -> None:
    net = Blocks(ClampedBlock)

    def step(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        first, second = y.square().mean(), y.abs().mean()
        model.backward(first)
        model.backward(second)
        return first + second

    trained(smp, out, net, step)


@program(stages=(2,), ranks=(2,))
def two_backwards_through_two_forwards(smp: Any, out: Any) -> None:
    """Each call of the function belongs to one of them."""
    net = Blocks(ClampedBlock)

    def step(model: Any, x: Tensor) -> Tensor:
        first = model(x).square().mean()
        model.backward(first)
        second = model(x).abs().mean()
        model.backward(second)
        return first + second

    trained(smp, out, net, step)


@program(stages=(2,), refused="register_multi_grad_hook")
def one_hook_on_several_gradients(smp: Any, out: Any) -> None:
    net = Blocks()
    norms: list[float] = []
    register_multi_grad_hook(
        list(net.parameters()),
        lambda grads: norms.append(sum(float(g.norm()) for g in grads if g is not None)),
    )
    trained(smp, out, net)


@program(stages=(2,), refused="backward hooks on all modules")
def a_backward_hook_on_all_modules(smp: Any, out: Any) -> None:
    def halve(module: nn.Module, given: Any, output: Any) -> Any:
        return tuple(g if g is None else g / 2 for g in given) if isinstance(module, Block) else None

    handle = register_module_full_backward_hook(halve)
    try:
        trained(smp, out, Blocks())
    finally:
        handle.remove()


@program(stages=(2,), ranks=(2,))
def a_block_hooks_a_node(smp: Any, out: Any) -> None:
    """Of autograd's graph; the hook reads what the step function sets for each microbatch."""
    state = {"scale": 1.0}

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.grad_fn is not None:
                y.grad_fn.register_prehook(lambda grads: (grads[0] * state["scale"],))
            return y

    def step(model: Any, x: Tensor) -> Tensor:
        state["scale"] *= 1.3
        loss = model(x).square().mean()
        model.backward(loss)
        state["scale"] *= 0.9
        return loss

    trained(smp, out, Blocks(Kind), step)


@program(stages=(2,), ranks=(2,), refused="grad_fn.register_prehook")
def a_container_hooks_a_node(smp: Any, out: Any) -> None:
    class Net(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            x.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
            return self.blocks[3](self.blocks[2](self.blocks[1](x)))

    trained(smp, out, Net())


@program(stages=(2,))
def a_hook_on_the_loss(smp: Any, out: Any) -> None:
    """It reads what the step function sets for each microbatch, before and after its backward."""
    state = {"scale": 1.0}

    def step(model: Any, x: Tensor) -> Tensor:
        state["scale"] *= 1.3
        loss = model(x).square().mean()
        loss.register_hook(lambda gradient: gradient * state["scale"])
        model.backward(loss)
        state["scale"] *= 0.9
        return loss

    trained(smp, out, Blocks(), step)


@program(stages=(2,), ranks=(2,), refused="is changed between two calls of model.backward")
def two_backwards_with_a_change_between(smp: Any, out: Any) -> None:
    """Each call of the function belongs to one of them, and reads what the step function sets."""
    state = {"scale": 1.0}

    class Scaled(Clamped):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * state["scale"]

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(super().forward(x))

    def step(model: Any, x: Tensor) -> Tensor:
        state["scale"] = 1.0
        first = model(x).square().mean()
        model.backward(first)
        state["scale"] = 2.0
        second = model(x).abs().mean()
        model.backward(second)
        return first + second

    trained(smp, out, Blocks(Kind), step)
