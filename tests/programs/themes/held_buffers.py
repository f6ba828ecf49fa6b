"""A root that looks at buffers of its modules in a step, and holds what it has seen over their next calls."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.plain import Plain
from tests.programs.small import TanhBlock, trained

ON_RANKS = {"stages": (2, 3), "ranks": (2,)}


class Normed(nn.Module):
    """A batch norm between blocks; a subclass calls it again, and does something with its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = TanhBlock(), nn.BatchNorm1d(6), TanhBlock()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.before(x))
        mean = self.norm.running_mean
        assert isinstance(mean, Tensor)
        return self.used(h, mean)

    def again(self, h: Tensor) -> Tensor:
        return self.norm(self.after(h))

    def used(self, h: Tensor, mean: Tensor) -> Tensor:
        raise NotImplementedError


@program(**ON_RANKS)
def held(smp: Any, out: Any) -> None:
    """A clone stays what it was, the buffer follows."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            return self.again(h * mean.clone()) + mean

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_by_views(smp: Any, out: Any) -> None:
    """Views that were made before follow too."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            part, same = mean[:1], mean.detach()
            h = self.again(h) + part
            return self.again(h) * 0.5 + same

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_twice(smp: Any, out: Any) -> None:
    """Looking again gives the same object."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            h = self.again(h)
            second = self.norm.running_mean
            assert second is mean
            return self.again(h) + mean + second

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_as_numbers(smp: Any, out: Any) -> None:
    """Numbers are of the moment."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            first = mean.mean().item()
            return self.again(h) * (1.0 + first) + mean.mean().item() + float(mean[2])

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_of_several(smp: Any, out: Any) -> None:
    """Two buffers, of which one changes by a number."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            calls, spread = self.norm.num_batches_tracked, self.norm.running_var
            assert isinstance(calls, Tensor) and isinstance(spread, Tensor)
            return self.again(h) * calls + spread - mean

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_to_the_end(smp: Any, out: Any) -> None:
    """What a step returns of it, and what a script keeps, is what it is in the end."""
    kept: list[Tensor] = []

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            kept.append(mean)
            return self.again(h)

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def look() -> None:
        out.value("kept", kept[-1].clone())
        kept.clear()

    trained(smp, out, Net(), step, after_step=look)


class Averaging(nn.Module):
    """Follows its input in a buffer, and adds that."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(self.linear(x)) + self.mean


@program(**ON_RANKS)
def held_and_filled(smp: Any, out: Any) -> None:
    """The root writes a result of the model into it, which the next call reads."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.average, self.after = TanhBlock(), Averaging(), TanhBlock()

        def forward(self, x: Tensor) -> Tensor:
            h = self.average(self.before(x))
            mean = self.average.mean
            mean.copy_(h.detach().mean(0) + 0.5)
            return self.average(self.after(h)) + mean

    trained(smp, out, Net())


class Count(nn.Module):
    """Counts its calls; a subclass says how."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("number", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return torch.tanh(self.linear(x))

    def count(self) -> None:
        self.number = self.number + 1


class ChangedToo(Count):
    def count(self) -> None:
        self.number.add_(1)
        self.number = self.number * 0.5


class Counted(nn.Module):
    """Holds the number over a further call."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.before, self.count, self.after = TanhBlock(), count, TanhBlock()

    def forward(self, x: Tensor) -> Tensor:
        h = self.count(self.before(x))
        first = self.count.number
        h = self.count(self.after(h))
        return h * first.sum() + self.count.number.mean()


@program(**ON_RANKS)
def bound_anew(smp: Any, out: Any) -> None:
    """The module binds another tensor: who holds the old one has the old numbers."""
    trained(smp, out, Counted(Count()))


@program(**ON_RANKS)
def changed_and_bound_anew(smp: Any, out: Any) -> None:
    """Both in one call."""
    trained(smp, out, Counted(ChangedToo()))


@program(**ON_RANKS)
def held_as_an_array(smp: Any, out: Any) -> None:
    """Nobody hears of its use."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            array = mean.numpy()
            return self.again(h) + float(array.sum())

    trained(smp, out, Net())


@program(**ON_RANKS)
def held_when_a_step_fails(smp: Any, out: Any) -> None:
    """The next step finds the buffers as they were, on all ranks, also if code has seen them at first."""
    now = {"step": 0}

    class Net(Normed):
        def forward(self, x: Tensor) -> Tensor:
            mean = self.norm.running_mean
            assert isinstance(mean, Tensor)
            return self.after(self.norm(self.before(x + mean)) + mean) + mean

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if now["step"] == 0:
            raise ValueError("as if something were wrong")
        model.backward(loss)
        return loss

    def around() -> Any:
        return contextlib.suppress(ValueError)

    net = Net()
    start = copy.deepcopy(net.state_dict())

    def after_step() -> None:
        now["step"] += 1
        if isinstance(smp, Plain) and now["step"] == 1:  # where the failed call has left its traces
            net.norm.load_state_dict({k.removeprefix("norm."): v for k, v in start.items() if "norm." in k})

    trained(smp, out, net, step, steps=3, around=around, after_step=after_step)


@program(**ON_RANKS, refused="batch norm whose statistics it is")
def saved_for_a_backward(smp: Any, out: Any) -> None:
    """They are changed before the backward that reads them, without autograd noticing."""

    class Net(Normed):
        def used(self, h: Tensor, mean: Tensor) -> Tensor:
            return self.again(h * mean)

    trained(smp, out, Net())


@program(**ON_RANKS)
def saved_by_what_has_run(smp: Any, out: Any) -> None:
    """To look at another one runs the call that has read the first, before the next microbatch changes it."""

    class Net(Normed):
        def forward(self, x: Tensor) -> Tensor:
            h = self.after(self.norm(self.before(x)))
            assert self.norm.running_mean is not None and self.norm.running_var is not None
            h = h * self.norm.running_mean
            return h + self.norm.running_var

    trained(smp, out, Net(), steps=3)


class Rebinding(TanhBlock):
    """Binds its average anew in each call, as user's code does that does not know of in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x) + self.average


class WithRebinding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.after = TanhBlock(), Rebinding(), TanhBlock()


@program(**ON_RANKS)
def held_and_left_by_the_module(smp: Any, out: Any) -> None:
    """What is held is the tensor of before the call, which the call reads; the change comes after it."""

    class Net(WithRebinding):
        def forward(self, x: Tensor) -> Tensor:
            average = self.block.average
            h = self.block(self.before(x))
            with torch.no_grad():
                average.add_(0.5)
            return self.after(h) + average

    trained(smp, out, Net())


@program(**ON_RANKS, refused="as bound before a call")
def bound_and_changed_after_a_call(smp: Any, out: Any) -> None:
    """The buffer is the value that was bound, which changes when it has been written for a call."""

    class Net(WithRebinding):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            mean = h.detach().mean(0)
            self.block.average = mean
            h = self.block(h)
            with torch.no_grad():
                mean.add_(0.5)
            return self.after(h) + mean

    trained(smp, out, Net())
