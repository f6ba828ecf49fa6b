"""Forwards change what backwards of other microbatches read, where autograd does not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained

REFUSED = "without autograd noticing"


class Codebook(Block):
    """Projects on a buffer, which it changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) @ self.codes
        self.codes.data.mul_(0.9)
        return torch.tanh(y)


def blocks(kind: type[Block]) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(4)))


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def a_codebook_is_changed_after_its_use(smp: Any, out: Any) -> None:
    trained(smp, out, blocks(Codebook))


@program(stages=(2,), ranks=(2,), microbatches=1)
def a_codebook_is_changed_after_its_use_one_microbatch(smp: Any, out: Any) -> None:
    """The backward reads the changed one, as in one process."""
    trained(smp, out, blocks(Codebook))


@program(stages=(2,), ranks=(2,))
def a_codebook_that_only_chooses(smp: Any, out: Any) -> None:
    """The gradient passes straight through, so no backward reads the codes."""

    class Kind(Codebook):
        def forward(self, x: Tensor) -> Tensor:
            z = self.linear(x)
            nearest = (z @ self.codes).argmax(1)
            chosen = self.codes[nearest]
            self.codes.data.mul_(0.9).index_add_(0, nearest, z.detach() * 0.1)
            return z + (chosen - z).detach()

    trained(smp, out, blocks(Kind))


@program(stages=(2,), refused="modified by an inplace operation")
def a_codebook_is_changed_where_autograd_notices(smp: Any, out: Any) -> None:
    class Kind(Codebook):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.codes.mul_(0.9)
            return torch.tanh(self.linear(x) @ self.codes)

    trained(smp, out, blocks(Kind))


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def a_weight_shrinks_in_forward(smp: Any, out: Any) -> None:
    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.linear.weight.data.mul_(0.99)
            return y

    trained(smp, out, blocks(Kind))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def microbatches_in_two_modes(smp: Any, out: Any) -> None:
    """Eval mode for the first, train mode for the second."""
    net = blocks(Normed)
    calls: list[int] = []

    def step(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        net[1].train(len(calls) % 2 == 0)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    trained(smp, out, net, step)


def consistent(net: nn.Module) -> Any:
    def step(model: Any, x: Tensor) -> Tensor:
        net.eval()
        target = model(x)
        net.train()
        loss = (model(x * 1.1) - target).square().mean()
        model.backward(loss)
        return loss

    return step


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def two_modes_in_each_microbatch(smp: Any, out: Any) -> None:
    net = blocks(Normed)
    trained(smp, out, net, consistent(net))


@program(stages=(2,), ranks=(2,), microbatches=1)
def two_modes_in_one_microbatch(smp: Any, out: Any) -> None:
    """Weights get their gradient in two parts."""
    net = blocks(Normed)
    trained(smp, out, net, consistent(net))


@program(stages=(2,), ranks=(2,))
def a_norm_that_is_frozen(smp: Any, out: Any) -> None:
    net = blocks(Normed)
    for part in net:
        part.norm.eval()
    trained(smp, out, net)


@program(stages=(2,), ranks=(2,), refused="the step function went on after a call had failed")
def an_error_is_caught(smp: Any, out: Any) -> None:
    """By container code, from a block that has looked at its data."""

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.mean() > -1:
                raise ValueError("too large")
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks(Kind)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    x = torch.tanh(block.linear(x)) * 0.5
            return x

    trained(smp, out, Net())


class Clipped(nn.Module):
    """The container clips, or shrinks, the weights of its blocks."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.blocks = blocks(Block)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.clip(block.linear.weight.data)
            x = block(x)
        return x


@program(stages=(2,), ranks=(2,))
def a_container_clips_weights(smp: Any, out: Any) -> None:
    """For the second microbatch there is nothing left to clip."""
    trained(smp, out, Clipped(lambda weight: weight.clamp_(-0.2, 0.2)))


@program(stages=(2,), ranks=(2,), refused="while other microbatches use it")
def a_container_shrinks_weights(smp: Any, out: Any) -> None:
    trained(smp, out, Clipped(lambda weight: weight.mul_(0.99)))


class Frozen(nn.Module):
    """Its own frozen scale is changed by way of .data after a call has kept it for its backward."""

    def __init__(self, *, changes_before: bool) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.linspace(0.2, 1, 6), requires_grad=False)
        self.changes_before = changes_before

    def forward(self, x: Tensor) -> Tensor:
        if self.changes_before:
            with torch.no_grad():
                self.scale.mul_(0.9)
            return self.second(self.first(x) + self.scale)
        h = self.first(x) * self.scale
        self.scale.data.mul_(0.9)
        return self.second(h)


@program(stages=(2,), ranks=(2,), refused="or backwards of earlier calls")
def a_frozen_parameter_is_changed_by_data(smp: Any, out: Any) -> None:
    trained(smp, out, Frozen(changes_before=False))


@program(stages=(2,), ranks=(2,))
def a_frozen_parameter_is_changed_that_nobody_keeps(smp: Any, out: Any) -> None:
    trained(smp, out, Frozen(changes_before=True))


INPUT = r"was changed by way of \.data or numpy.* after a call had read it"


def halving(halve: Any) -> Any:
    """The batch is changed after the model has read it, and before the backward, which reads it again."""

    def step(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        halve(x)
        loss = (y - x).square().mean()
        model.backward(loss)
        return loss

    return step


@program(stages=(2,), ranks=(2,), refused=INPUT)
def the_batch_is_changed_by_data(smp: Any, out: Any) -> None:
    trained(smp, out, blocks(Block), halving(lambda x: x.data.mul_(0.5)))


@program(stages=(2,), refused=INPUT)
def the_batch_is_changed_by_numpy(smp: Any, out: Any) -> None:
    trained(smp, out, blocks(Block), halving(lambda x: np.multiply(x.numpy(), 0.5, out=x.numpy())))


@program(stages=(2,), ranks=(2,), refused=INPUT)
def the_batch_is_in_an_array_that_changes(smp: Any, out: Any) -> None:
    """As a ring buffer would: torch hears nothing of it."""
    model = smp.DistributedModel(blocks(Block))
    array = torch.linspace(-1, 1, 24).reshape(4, 6).numpy()

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        array[:] *= 0.5
        model.backward(loss)
        return loss

    out.value("loss", train_step(torch.from_numpy(array)).reduce_mean())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def the_batch_is_looked_at_by_numpy(smp: Any, out: Any) -> None:
    means: list[float] = []
    trained(smp, out, blocks(Block), halving(lambda x: means.append(float(x.numpy().mean()))))
