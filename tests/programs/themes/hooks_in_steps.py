"""Hooks on gradients of parameters and modules that are put on while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock, trained

PARAMETER = "a hook was put on the gradient of the parameter 'blocks.1.linear.weight' inside an smp.step"
REPLAYED = "static_mode: True, .* puts a hook on the gradient of its parameter blocks.1.linear.weight"
MODULE = "a backward hook was put on the module 'blocks.1.linear' inside an smp.step"


class Net(nn.Module):
    """Four blocks, of which the second does something before its layer is called, and after.

    Args:
        before: gets the layer and the block's input, and gives a handle or None.
        is_removed: whether the handle is removed when the layer has been called.
    """

    def __init__(self, before: Callable[[nn.Linear, Tensor], Any], *, is_removed: bool = False) -> None:
        super().__init__()

        class Hooking(TanhBlock):
            def forward(self, x: Tensor) -> Tensor:
                handle = before(self.linear, x)
                y = super().forward(x)
                if is_removed:
                    handle.remove()
                return y

        self.blocks = nn.ModuleList([TanhBlock(), Hooking(), TanhBlock(), TanhBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def weigh_once(layer: nn.Linear, x: Tensor) -> None:
    """The gradient of this microbatch counts by its input."""
    weight = x.detach().square().mean()

    def hook(gradient: Tensor) -> Tensor:
        handle.remove()
        return weight * gradient

    handle = layer.weight.register_hook(hook)


def clip_once(layer: nn.Linear, x: Tensor) -> None:
    def hook(parameter: nn.Parameter) -> None:
        handle.remove()
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    handle = layer.weight.register_post_accumulate_grad_hook(hook)


@program(
    stages=(1, 2), pipelines=("interleaved", "zero_bubble"), static=True, refused=f"{PARAMETER}|{REPLAYED}"
)
def one_more_for_each_forward(smp: Any, out: Any) -> None:
    trained(smp, out, Net(lambda layer, x: layer.weight.register_hook(doubled)))


@program(refused=PARAMETER)
def once_for_each_forward(smp: Any, out: Any) -> None:
    trained(smp, out, Net(weigh_once))


@program(microbatches=1, pipelines=("interleaved", "zero_bubble"))
def once_in_the_only_microbatch(smp: Any, out: Any) -> None:
    trained(smp, out, Net(weigh_once))


@program(refused=PARAMETER)
def after_the_sum(smp: Any, out: Any) -> None:
    trained(smp, out, Net(clip_once))


@program(refused=PARAMETER)
def where_data_say_so(smp: Any, out: Any) -> None:
    def hook(layer: nn.Linear, x: Tensor) -> None:
        if x.mean() > -10:
            layer.weight.register_hook(doubled)

    trained(smp, out, Net(hook))


@program(refused=PARAMETER)
def by_the_step_function(smp: Any, out: Any) -> None:
    net = Net(lambda layer, x: None)

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        net.blocks[1].linear.weight.register_hook(doubled)
        model.backward(loss)
        return loss

    trained(smp, out, net, step)


@program(refused=PARAMETER, microbatches=1)
def after_the_sum_by_the_step_function(smp: Any, out: Any) -> None:
    net = Net(lambda layer, x: None)

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        clip_once(net.blocks[1].linear, x)
        model.backward(loss)
        return loss

    trained(smp, out, net, step)


@program()
def on_parameters_that_a_forward_makes(smp: Any, out: Any) -> None:
    class Inner(TanhBlock):
        """Gradients of its own, within the forward."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                start = nn.Parameter(x.detach().clone())
                start.register_hook(doubled)
                start.square().sum().backward()
            return super().forward(x) + start.grad

    trained(smp, out, nn.Sequential(TanhBlock(), Inner(), TanhBlock(), TanhBlock()))


def _scaled(module: nn.Module, given: Any, made: Any) -> Any:
    return (2 * given[0],)


@program(refused=MODULE)
def one_more_on_a_module_for_each_forward(smp: Any, out: Any) -> None:
    trained(smp, out, Net(lambda layer, x: layer.register_full_backward_hook(_scaled)))


@program(static=True, ranks=(2,), pipelines=("interleaved", "zero_bubble"))
def on_a_module_while_it_is_called(smp: Any, out: Any) -> None:
    """Autograd keeps it for this call, and the module forgets it."""
    net = Net(lambda layer, x: layer.register_full_backward_hook(_scaled), is_removed=True)
    trained(smp, out, net)


@program(static=True, pipelines=("interleaved", "zero_bubble"))
def before_the_backward_of_a_module_while_it_is_called(smp: Any, out: Any) -> None:
    net = Net(
        lambda layer, x: layer.register_full_backward_pre_hook(lambda module, made: (2 * made[0],)),
        is_removed=True,
    )
    trained(smp, out, net)
