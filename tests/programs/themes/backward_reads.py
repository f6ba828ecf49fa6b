"""Python that runs within a backward pass reads what the step function sets for each microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import program
from tests.programs.small import trained as small_trained

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


def with_hook(block: Block, hook: Any) -> None:
    block.linear.register_full_backward_hook(lambda module, given, made: hook(given))


@program(stages=(2,), ranks=(2,))
def hooks_count_from_one_backward_to_the_next(smp: Any, out: Any) -> None:
    """What only backward code changes goes on: here each call scales by how many there were."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            with_hook(self, self.scale)

        def scale(self, given: Any) -> Any:
            self.calls += 1
            return tuple(g if g is None else g * self.calls for g in given)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,))
def hooks_count_in_a_dict(smp: Any, out: Any) -> None:
    """The same in a dict that nothing else looks at."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            calls = {"of": 0}

            def scale(given: Any) -> Any:
                calls["of"] += 1
                return tuple(g if g is None else g * calls["of"] for g in given)

            with_hook(self, scale)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,), refused="by the step function or the forward")
def hooks_change_what_the_step_function_changes(smp: Any, out: Any) -> None:
    """The step function scales the strength up, each backward down."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            with_hook(self, self.weaken)

        def weaken(self, given: Any) -> Any:
            self.strength *= 0.5
            return tuple(g if g is None else g * self.strength for g in given)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,), refused="and read by forward")
def forward_reads_what_a_hook_sets(smp: Any, out: Any) -> None:
    """The forward of the second microbatch sees the gradients' size of the first."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.size = 1.0
            with_hook(self, self.measure)

        def measure(self, given: Any) -> None:
            self.size = sum(float(g.abs().sum()) for g in given if g is not None)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1.0 + self.size)

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,), refused="and read by forward")
def forward_reads_a_list_of_a_hook(smp: Any, out: Any) -> None:
    """The same by way of a list."""
    sizes: list[float] = []

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            with_hook(self, self.measure)

        def measure(self, given: Any) -> None:
            sizes.append(sum(float(g.abs().sum()) for g in given if g is not None))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1.0 + len(sizes))

    trained(smp, out, Kind)


@program(stages=(2,), ranks=(2,), static=True)
def hooks_read_what_is_set_between_steps(smp: Any, out: Any) -> None:
    """A schedule of the hooks' strength, advanced after each step; the step function leaves it alone."""
    schedule = {"strength": 1.0}

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.linear.weight.register_hook(lambda grad: grad * schedule["strength"])

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * self.strength)
            return y

    net = nn.Sequential(*(Kind() for _ in range(4)))

    def advance() -> None:
        schedule["strength"] *= 0.5
        for block in net:
            block.strength *= 1.5

    small_trained(smp, out, net, steps=4, after_step=advance)
