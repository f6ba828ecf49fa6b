"""Blocks are given objects that container code changes between their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock
from tests.programs.small import trained as small_trained


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0
        self.weights = torch.ones(6)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    __call__ = scaled


class Slots:
    __slots__ = ("scale",)


class Equal:
    """Compared by content, and so without a hash."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.scale == other.scale


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Settings) -> Tensor:
        ctx.settings = settings
        return x * settings.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.settings.scale, None


def trained(smp: Any, out: Any, forward: Any, between: Any, make: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, given: Any) -> Tensor:
            return forward(torch.tanh(self.linear(x)), given)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            given = make()
            for block in self.blocks:
                x = block(x, given)
                between(given)
            return x

    small_trained(smp, out, Net())


def grown(settings: Any) -> None:
    settings.scale *= 1.5


@program(stages=(2, 3), ranks=(2,), always_on_ranks=True)
def object_with_an_attribute(smp: Any, out: Any) -> None:
    """settings.scale *= 1.5 between the blocks that get it."""
    trained(smp, out, lambda x, settings: x * settings.scale, grown, Settings)


@program(stages=(2,), ranks=(2,))
def object_with_slots(smp: Any, out: Any) -> None:
    """The same with __slots__."""

    def make() -> Slots:
        slots = Slots()
        slots.scale = 1.0
        return slots

    trained(smp, out, lambda x, settings: x * settings.scale, grown, make)


@program(stages=(2,), ranks=(2,))
def object_without_a_hash(smp: Any, out: Any) -> None:
    """The same with __eq__ alone."""
    trained(smp, out, lambda x, settings: x * settings.scale, grown, Equal)


@program(stages=(2,), ranks=(2,))
def tensor_in_an_object_changed_in_place(smp: Any, out: Any) -> None:
    """The object's tensor is changed in place."""
    trained(smp, out, lambda x, s: x + s.weights, lambda s: s.weights.mul_(1.5), Settings)


@program(stages=(2,), ranks=(2,))
def namespaces_in_a_dict(smp: Any, out: Any) -> None:
    """A namespace in a namespace in a dict, with a list."""

    def make() -> dict[str, Any]:
        return {"a": SimpleNamespace(inner=SimpleNamespace(scale=1.0), weights=[1.0])}

    def between(given: dict[str, Any]) -> None:
        given["a"].inner.scale *= 1.2
        given["a"].weights[0] *= 1.1

    trained(smp, out, lambda x, given: x * given["a"].inner.scale * given["a"].weights[0], between, make)


@program(stages=(2,), ranks=(2,))
def bound_method(smp: Any, out: Any) -> None:
    """A bound method, whose object's attribute changes."""
    trained(smp, out, lambda x, f: f(x), lambda f: grown(f.__self__), lambda: Settings().scaled)


@program(stages=(2,), ranks=(2,))
def callable_object(smp: Any, out: Any) -> None:
    """The same for an object with __call__."""
    trained(smp, out, lambda x, f: f(x), grown, Settings)


@program(stages=(2,), ranks=(2,))
def closures(smp: Any, out: Any) -> None:
    """A lambda over a dict that changes."""
    kept = {"scale": 1.0}

    def between(_: Any) -> None:
        kept["scale"] *= 1.1

    trained(smp, out, lambda x, f: f(x), between, lambda: lambda x: x * kept["scale"])


@program(stages=(2,), ranks=(2,))
def array_changed_in_place(smp: Any, out: Any) -> None:
    """A numpy array."""

    def halve(array: Any) -> None:
        array *= 0.5

    trained(smp, out, lambda x, array: x * float(array[0]), halve, lambda: np.ones(2))


@program(stages=(2,), ranks=(2,))
def set_that_grows(smp: Any, out: Any) -> None:
    """Its length scales."""
    trained(smp, out, lambda x, found: x * len(found), lambda found: found.add(len(found)), lambda: {-1})


@program(stages=(2,), ranks=(2,), refused="was given an object that changed")
def object_in_an_autograd_function(smp: Any, out: Any) -> None:
    """Container code applies an autograd function that keeps the object."""
    settings = Settings()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = Scale.apply(block(x), settings)
                grown(settings)
            return x

    model = smp.DistributedModel(Net())

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    out.value("loss", step(model, torch.ones(8, 6)).reduce_mean())


@program(stages=(2,), ranks=(2,))
def tensors_with_attributes(smp: Any, out: Any) -> None:
    """Each block reads an attribute of the tensor that it is given, and sets one on its result."""

    def scaled(x: Tensor, given: Any) -> Tensor:
        factor = getattr(given, "factor", 1.0)
        y = x * factor
        y.factor = factor * 1.1  # type: ignore[attr-defined]
        return y

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return scaled(torch.tanh(self.linear(x)), x)

    small_trained(smp, out, nn.Sequential(*(Block() for _ in range(4))))


@program(stages=(2,), ranks=(2,))
def tensors_marked_by_the_container(smp: Any, out: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * getattr(x, "factor", 0.1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x.factor = 1.0 + i  # type: ignore[attr-defined]
                x = block(x)
            return x

    small_trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def tensors_marked_by_a_block_that_looks(smp: Any, out: Any) -> None:
    """It runs for real, since it looks at its data."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x)) * getattr(x, "factor", 1.0)
            y.factor = 2.0 if float(y.detach().sum()) > 0 else 0.5  # type: ignore[attr-defined]
            return y

    small_trained(smp, out, nn.Sequential(*(Block() for _ in range(4))))


def tagged(net: nn.Module) -> nn.Module:
    for i, parameter in enumerate(net.parameters()):
        parameter.factor = 1.0 + i  # type: ignore[attr-defined]
    return net


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def parameters_with_attributes(smp: Any, out: Any) -> None:
    """The step function weighs its penalty by what the script has set on each parameter.

    The tolerance: in the first step its gradients are added when those of all microbatches are there.
    """
    net = tagged(nn.Sequential(*(TanhBlock() for _ in range(4))))

    def step(model: Any, x: Tensor) -> Tensor:
        penalty = sum(getattr(p, "factor", 0.0) * p.square().sum() for p in net.parameters())
        loss = model(x).square().mean() + 0.01 * penalty
        model.backward(loss)
        return loss

    small_trained(smp, out, net, step)


@program(stages=(2,), ranks=(2,))
def parameters_with_attributes_in_blocks(smp: Any, out: Any) -> None:
    class Block(TanhBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.linear.weight.factor / 4

    small_trained(smp, out, tagged(nn.Sequential(*(Block() for _ in range(4)))))
