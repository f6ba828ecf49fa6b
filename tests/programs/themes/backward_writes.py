"""What hooks and backwards change is read by code that is recorded before they run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained

READ = "and read by forward or the step function"


class Net(nn.Module):
    """``after`` is called on the result of every block; ``hook`` sees every weight's gradient."""

    def __init__(self, hook: Any, after: Callable[[Tensor], Tensor], kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.after = after
        for block in self.blocks:
            block.linear.weight.register_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.after(block(x))
        return x


def same(x: Tensor) -> Tensor:
    return x


@program(stages=(2,), ranks=(2,), refused=READ)
def the_step_function_weighs_by_a_count(smp: Any, out: Any) -> None:
    """Before its backward, so that microbatch 1 sees what microbatch 0 has counted."""
    counts = {"n": 0}

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean() * (1 + counts["n"])
        model.backward(loss)
        return loss

    def count(gradient: Tensor) -> None:
        counts["n"] += 1

    trained(smp, out, Net(count, same), step)


@program(stages=(2,), microbatches=1)
def the_step_function_weighs_by_the_last_steps_count(smp: Any, out: Any) -> None:
    """The same with one microbatch, where nothing is read too early."""
    counts = {"n": 0}

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean() * (1 + counts["n"])
        model.backward(loss)
        return loss

    def count(gradient: Tensor) -> None:
        counts["n"] += 1

    trained(smp, out, Net(count, same), step)


@program(stages=(2,), refused=READ, microbatches=1)
def the_step_function_returns_a_count(smp: Any, out: Any) -> None:
    """After its backward, by way of a helper."""
    counts = {"n": 0}

    def weighed(loss: Tensor) -> Tensor:
        return loss.detach() * (1 + counts["n"])

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return weighed(loss)

    def count(gradient: Tensor) -> None:
        counts["n"] += 1

    trained(smp, out, Net(count, same), step)


@program(stages=(2,), refused=READ, microbatches=1)
def the_step_function_asks_a_block(smp: Any, out: Any) -> None:
    """An attribute of a module, after its backward."""

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.linear.bias.register_hook(self.count)

        def count(self, gradient: Tensor) -> None:
            self.calls += 1

    net = Net(lambda gradient: None, same, Kind)

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss.detach() * (1 + net.blocks[3].calls)

    trained(smp, out, net, step)


@program(stages=(2,), ranks=(2,), refused=READ)
def a_helper_reads_a_dict(smp: Any, out: Any) -> None:
    """Container code scales by what hooks have summed up."""
    state = {"scale": 1.0}

    def scaled(x: Tensor) -> Tensor:
        return x * state["scale"]

    def measure(gradient: Tensor) -> None:
        state["scale"] += 0.5

    trained(smp, out, Net(measure, scaled))


@program(stages=(2,), refused=READ)
def a_forward_hook_reads_an_object(smp: Any, out: Any) -> None:
    state = SimpleNamespace(scale=1.0)

    def measure(gradient: Tensor) -> None:
        state.scale += 0.5

    net = Net(measure, same)
    net.register_forward_hook(lambda module, args, output: output * state.scale)
    trained(smp, out, net)


@program(stages=(2,), refused=READ)
def a_property_reads_a_list(smp: Any, out: Any) -> None:
    class Measured(Net):
        def __init__(self) -> None:
            self._scales = [1.0]
            super().__init__(self.measure, self.scaled)

        def measure(self, gradient: Tensor) -> None:
            self._scales[0] += 0.5

        @property
        def scale(self) -> float:
            return self._scales[0]

        def scaled(self, x: Tensor) -> Tensor:
            return x * self.scale

    trained(smp, out, Measured())


@program(stages=(2,), refused=READ)
def a_class_keeps_the_scale(smp: Any, out: Any) -> None:
    class Shared:
        scale = 1.0

    def measure(gradient: Tensor) -> None:
        Shared.scale += 0.5

    trained(smp, out, Net(measure, lambda x: x * Shared.scale))


@program(stages=(2,), refused=READ)
def a_variable_around_both(smp: Any, out: Any) -> None:
    scale = 1.0

    def measure(gradient: Tensor) -> None:
        nonlocal scale
        scale += 0.5

    trained(smp, out, Net(measure, lambda x: x * scale))


@program(stages=(2,), ranks=(2,), refused=READ)
def a_tensor_is_changed_in_place(smp: Any, out: Any) -> None:
    offset = torch.zeros(())

    def measure(gradient: Tensor) -> None:
        offset.add_(0.5)

    trained(smp, out, Net(measure, lambda x: x + offset))


@program(stages=(2,), ranks=(2,), refused=READ)
def a_backward_changes_a_buffer(smp: Any, out: Any) -> None:
    """The backward of an autograd function adds to a buffer, which forward reads."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
            ctx.module = module
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            ctx.module.seen.add_(gradient.abs().sum())
            return gradient, None

    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(super().forward(x), self) + self.seen

    trained(smp, out, nn.Sequential(*(Kind() for _ in range(4))))


@program(stages=(2,), ranks=(2,), refused="draws random numbers")
def a_hook_adds_noise(smp: Any, out: Any) -> None:
    trained(smp, out, Net(lambda gradient: gradient + 0.1 * torch.randn(gradient.shape), same))


@program(stages=(2,), ranks=(2,), refused="used by such code that changes gradients of other stages")
def hooks_of_two_stages_share_a_count(smp: Any, out: Any) -> None:
    """Each gradient is divided by how many came before it, on all stages."""
    counts = {"n": 0}

    def divide(gradient: Tensor) -> Tensor:
        counts["n"] += 1
        return gradient / counts["n"]

    trained(smp, out, Net(divide, same))


@program(stages=(2,), ranks=(2,), refused="used by such code that changes gradients of other stages")
def backwards_of_two_stages_share_a_count_later(smp: Any, out: Any) -> None:
    """An autograd function's backward, which counts from the second step on."""
    counts = {"step": 0, "n": 0}

    class Divided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if counts["step"] > 1:
                counts["n"] += 1
            return gradient / (1 + counts["n"])

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Divided.apply(super().forward(x))

    def count() -> None:
        counts["step"] += 1

    trained(smp, out, nn.Sequential(*(Kind() for _ in range(4))), steps=4, after_step=count)


@program(stages=(2, 4), ranks=(2,))
def hooks_of_two_stages_collect_together(smp: Any, out: Any) -> None:
    """Counts and lists that only collect are nobody's business, whatever the hooks return."""
    counts: dict[str, int] = {"all": 0}
    norms: list[float] = []

    def halve(gradient: Tensor) -> Tensor:
        counts["all"] += 1
        norms.append(float(gradient.norm()))
        return gradient / 2

    def keep(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: norms.append(float(gradient.sum())))
        return x

    trained(smp, out, Net(halve, keep))


@program(stages=(2,), ranks=(2,))
def one_dict_for_both_directions(smp: Any, out: Any) -> None:
    """Forward keeps activations under one key, hooks gradients under another."""
    seen: dict[str, list[Any]] = {"forward": [], "backward": []}

    def keep(x: Tensor) -> Tensor:
        seen["forward"].append(x.shape)
        return x

    trained(smp, out, Net(lambda gradient: seen["backward"].append(gradient.norm()), keep))


def with_norm(use_reentrant: bool) -> nn.Module:
    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=use_reentrant)

        def inner(self, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(self.linear(x)))

    return nn.Sequential(Block(), *(Kind() for _ in range(3)))


@program(stages=(2,), ranks=(2,), refused="by the checkpoint that runs it again")
def running_statistics_under_a_checkpoint(smp: Any, out: Any) -> None:
    """They change twice for each microbatch, and here the second forward may come between two others."""
    trained(smp, out, with_norm(use_reentrant=False))


@program(stages=(2,), refused="by the checkpoint that runs it again")
def running_statistics_under_a_reentrant_checkpoint(smp: Any, out: Any) -> None:
    trained(smp, out, with_norm(use_reentrant=True))


@program(stages=(2,), ranks=(2,), microbatches=1)
def running_statistics_under_a_checkpoint_one_microbatch(smp: Any, out: Any) -> None:
    trained(smp, out, with_norm(use_reentrant=False))
