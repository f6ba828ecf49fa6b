"""Python that runs within a backward pass reads what the step function sets for each microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import program

SETTINGS = {"strength": 1.0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def trained(smp: Any, out: Any, kind: type[Block]) -> None:
    SETTINGS["strength"] = 1.0
    net = nn.Sequential(*(kind() for _ in range(4)))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        for block in net:
            block.strength *= 1.3
        SETTINGS["strength"] *= 1.3
        loss = model(x).square().mean()
        for block in net:
            block.strength *= 1.1
        model.backward(loss)
        for block in net:
            block.strength *= 0.9
        return loss

    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        out.value("loss", step(model, torch.randn(8, 6, generator=generator)).reduce_mean())
        optimizer.step()
    out.model(model)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.block.strength, None


@program(stages=(2, 3), ranks=(2,))
def block_in_the_context(smp: Any, out: Any) -> None:
    """An autograd function keeps the block, and its backward asks it for the strength."""

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(super().forward(x), self)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,))
def hook_on_a_result_reads_an_attribute(smp: Any, out: Any) -> None:
    """x.register_hook with a lambda over self."""

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * self.strength)
            return y

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,))
def hook_on_a_result_reads_a_dict(smp: Any, out: Any) -> None:
    """The same over a global dict."""

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * SETTINGS["strength"])
            return y

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,))
def hook_on_a_parameter_reads_an_attribute(smp: Any, out: Any) -> None:
    """A hook on the weight, put on where the block is made."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.linear.weight.register_hook(lambda grad: grad * self.strength)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,))
def backward_hook_of_a_module_reads_a_dict(smp: Any, out: Any) -> None:
    """register_full_backward_hook, scaling what goes on."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.linear.register_full_backward_hook(
                lambda module, given, made: tuple(g if g is None else g * SETTINGS["strength"] for g in given)
            )

    trained(smp, out, Kind)


class Inner(nn.Module):
    """What a checkpoint computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * SETTINGS["strength"])


@program(stages=(2,), ranks=(2,))
def checkpointed_part_reads_a_dict(smp: Any, out: Any) -> None:
    """The recomputation scales by a global dict, as of then."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + checkpoint(self.inner, x, use_reentrant=False)

    trained(smp, out, Kind)
