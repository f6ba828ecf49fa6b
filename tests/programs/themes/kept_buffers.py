"""Code that keeps the tensor of a buffer beside its module, from before the step: it follows the training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.plain import Plain
from tests.programs.small import TanhBlock, plain_step, trained

ON_RANKS = {"stages": (2, 3), "ranks": (2,)}


class Norm(nn.BatchNorm1d):
    """With a mask that stays as it is."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(6)
        self.register_buffer("mask", torch.rand(6))


def _mean(norm: Norm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _variance(norm: Norm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var


Use = Callable[[Tensor, Any], Tensor]
WAYS: dict[str, tuple[Callable[[Norm], Any], Use]] = {
    "product": (lambda norm: [_mean(norm)], lambda x, kept: x * kept[0]),
    "view": (lambda norm: _variance(norm)[:3], lambda x, kept: x / kept.sum()),
    "detached": (lambda norm: _mean(norm).detach(), lambda x, kept: x + kept),
    "state": (lambda norm: norm.state_dict(), lambda x, kept: x * kept["running_mean"]),
    "number": (lambda norm: norm.num_batches_tracked, lambda x, kept: x / float(kept + 1)),
    "decision": (_mean, lambda x, kept: x * 2 if kept.sum() > 0 else x),
    "two": (lambda norm: (_mean(norm), _variance(norm)), lambda x, kept: torch.addcmul(x, *kept)),
    "list": (_mean, lambda x, kept: x + torch.stack([kept, kept]).sum(0)),
    "property": (_mean, lambda x, kept: x + kept.data * kept.T),
    "array": (_mean, lambda x, kept: x + torch.from_numpy(kept.numpy().copy())),
    "mask": (lambda norm: norm.mask, lambda x, kept: x * kept),
}


class Keeps(nn.Module):
    """Uses buffers of a module that it does not hold."""

    def __init__(self, norm: Norm, ways: Any = WAYS) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = [WAYS[way][0](norm) for way in ways]
        self.uses = [WAYS[way][1] for way in ways]
        self.mean = _mean(norm)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        for use, kept in zip(self.uses, self.kept, strict=True):
            h = use(h, kept)
        return h + self.mean if len(self.uses) > 1 else h


class Net(nn.Module):
    """A norm, and blocks near it and far from it that keep its buffers."""

    def __init__(self, ways: Any = WAYS) -> None:
        super().__init__()
        self.before, self.norm = TanhBlock(), Norm()
        self.near, self.middle, self.far = Keeps(self.norm, ways), TanhBlock(), Keeps(self.norm, ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.far(self.middle(self.near(self.norm(self.before(x)))))


@program(
    **ON_RANKS,
    replicas=(1, 2),
    always_on_ranks=True,
    static=True,
    refused_static="a parameter or buffer that is not its own",
)
def buffers_of_others(smp: Any, out: Any) -> None:
    """In all ways, after the norm."""
    trained(smp, out, Net())


@program(**ON_RANKS, static=True)
def masks_of_others(smp: Any, out: Any) -> None:
    """Buffers that nobody changes."""
    trained(smp, out, Net(["mask"]))


class Twice(Net):
    """The norm is called again after the blocks that keep its buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


@program(**ON_RANKS)
def buffers_of_others_that_change_again(smp: Any, out: Any) -> None:
    """What no gradient needs is of the moment."""
    trained(smp, out, Twice(["detached", "number", "decision", "list"]))


class Before(Net):
    """The blocks that keep them are called before the norm: in the first step, by what it was."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.far(self.near(self.before(x))))


@program(**ON_RANKS)
def buffers_of_others_before_they_change(smp: Any, out: Any) -> None:
    """In the first step nobody has changed them yet."""
    trained(smp, out, Before(["detached", "number", "decision", "list"]))


@program(**ON_RANKS, refused="batch norm whose statistics it is")
def saved_for_a_backward(smp: Any, out: Any) -> None:
    """A gradient needs them as they were, and the norm changes them without telling autograd."""
    trained(smp, out, Twice(["product"]))


class Alike(nn.Module):
    """Uses statistics and a weight of its own, or of another that is built alike."""

    def __init__(self, other: Alike | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), Norm()
        self.means = [_mean((other or self).norm)]
        self.weights = [(other or self).linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)) @ self.weights[0]) + self.means[0]


class OfAlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Alike()
        self.second, self.third = Alike(), Alike(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


@program(**ON_RANKS, always_on_ranks=True)
def of_blocks_that_are_alike(smp: Any, out: Any) -> None:
    """Two keep what is their own, the third what is the first's."""
    trained(smp, out, OfAlike(), steps=3)


class Scaled(TanhBlock):
    """By a buffer that others change."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale


class Scales(TanhBlock):
    """Changes a buffer that it keeps of another."""

    def __init__(self, scaled: Scaled) -> None:
        super().__init__()
        self.kept = [scaled.scale]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept[0].mul_(0.9)
        return super().forward(x)


class ChangedByOthers(nn.Module):
    """The calls before read what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.kept, self.part = [self.scaled.scale], self.scaled.scale[:3]
        self.scales, self.after = Scales(self.scaled), TanhBlock()

    def forward(self, x: Tensor) -> Tensor:
        h = self.scaled(x)
        with torch.no_grad():
            self.kept[0].mul_(0.9)
        h = self.scaled(h)
        with torch.no_grad():
            self.part.copy_(h.detach().mean(0)[:3])
        h = self.scales(self.scaled(h))
        with torch.no_grad():
            self.part.add_(0.1)
        return self.after(self.scaled(h))


@program(**ON_RANKS, replicas=(1, 2), always_on_ranks=True)
def changed_through_what_is_kept(smp: Any, out: Any) -> None:
    """By the root, by another block, by a view."""
    trained(smp, out, ChangedByOthers(), steps=3)


class Rooted(Net):
    """The root keeps some itself, one of them from the first step on."""

    def __init__(self) -> None:
        super().__init__([])
        self.kept = [self.norm.running_mean]
        self.later: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if not self.later:
            self.later.append(self.norm.running_var)
        assert self.kept[0] is not None and self.later[0] is not None
        return h * self.kept[0] + self.later[0]


@program(**ON_RANKS, replicas=(1, 2))
def kept_by_the_root(smp: Any, out: Any) -> None:
    """Its own code runs on all ranks."""
    trained(smp, out, Rooted())


@program(**ON_RANKS)
def kept_by_the_step_function(smp: Any, out: Any) -> None:
    """A state dict of the plain module, read in the step."""
    net = Net(["product"])
    state = net.state_dict()

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean() * state["norm.running_var"].sum()
        model.backward(loss)
        return loss

    trained(smp, out, net, step)


@program(**ON_RANKS)
def evaluated_in_between(smp: Any, out: Any) -> None:
    """The first step changes none of them."""
    net = Net()
    net.eval()
    calls = [0]

    def after_step() -> None:
        calls[0] += 1
        net.train(calls[0] % 2 == 1)

    trained(smp, out, net, steps=5, after_step=after_step)


@program(stages=(2,), ranks=(2,), refused_on_ranks=r"sum of a tensor that is the buffer 'norm.running_mean'")
def read_between_steps(smp: Any, out: Any) -> None:
    """There ranks do not wait for each other."""
    net = Net([])
    mean = net.norm.running_mean
    assert mean is not None
    trained(smp, out, net, after_step=lambda: out.value("mean", mean.sum()))


@program(stages=(2,), ranks=(2,))
def loaded_from_a_live_state(smp: Any, out: Any) -> None:
    """A state dict of the plain module follows the training, so loading it changes nothing."""
    net = Net([])
    state = net.state_dict()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = smp.step(plain_step)
    for _ in range(3):
        optimizer.zero_grad()
        out.value("loss", step(model, torch.randn(8, 6)).reduce_mean())
        optimizer.step()
        model.load_state_dict(state)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def looked_at_between_steps(smp: Any, out: Any) -> None:
    """What has nothing to do with the numbers, and copies of before."""
    net = Net([])
    state = net.state_dict()
    copies = {name: value.clone() for name, value in state.items()}
    trained(smp, out, net, after_step=lambda: out.value("shapes", [tuple(v.shape) for v in state.values()]))
    out.value("copies", [value.sum() for value in copies.values()])


@program(**ON_RANKS)
def kept_over_a_step_that_fails(smp: Any, out: Any) -> None:
    """The statistics are those of before the step, for all."""
    steps = [0]
    net = Net(["detached", "product", "number"])
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if not steps[0]:
            raise ValueError("as if something were wrong")
        model.backward(loss)
        return loss

    def after_step() -> None:
        steps[0] += 1
        if isinstance(smp, Plain) and steps[0] == 1:  # where the failed call has left its traces
            net.load_state_dict(start)

    trained(
        smp, out, net, step, steps=3, around=lambda: contextlib.suppress(ValueError), after_step=after_step
    )
