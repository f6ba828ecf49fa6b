"""Blocks whose results share memory: with each other, or with a buffer of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock, trained

ON_RANKS = {"stages": (2, 3), "ranks": (2,)}


class Parts(nn.Module):
    """Gives what it made and views of it; a subclass says in which order and in what."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.parts(torch.tanh(self.linear(x)) + 0.5)

    def parts(self, h: Tensor) -> Any:
        return h, h[:, :3]


class PartFirst(Parts):
    def parts(self, h: Tensor) -> Any:
        return h[:, :3], h


class Named(Parts):
    def parts(self, h: Tensor) -> Any:
        return {"left": h[:, :3], "right": h[:, 3:], "whole": h}


class Counting(nn.Module):
    """Counts its calls in a buffer, which it hands over as it is."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        return torch.tanh(self.linear(x)), self.given()

    def given(self) -> Tensor:
        return self.count


class CountingView(Counting):
    def given(self) -> Tensor:
        return self.count[0]


class Between(nn.Module):
    """Blocks around one that is about something."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = TanhBlock(), middle, TanhBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.changed(self.middle(self.before(x))) + 0.1)

    def changed(self, given: Any) -> Tensor:
        raise NotImplementedError


@program(**ON_RANKS)
def base_changes(smp: Any, out: Any) -> None:
    """The view shows what its base becomes."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            whole, part = given
            whole.mul_(2.0)
            return whole + part.repeat(1, 2)

    trained(smp, out, Net(Parts()))


@program(**ON_RANKS)
def view_changes(smp: Any, out: Any) -> None:
    """The base shows what its view becomes, also where the view is the first of the results."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            part, whole = given
            part.mul_(2.0)
            return whole + part.repeat(1, 2)

    trained(smp, out, Net(PartFirst()))


@program(**ON_RANKS)
def parts_change(smp: Any, out: Any) -> None:
    """Views beside each other change, one after the other, and the base after them."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            given["left"].add_(1.0)
            given["right"].mul_(0.5)
            given["whole"].mul_(2.0)
            return torch.cat([given["right"], given["left"]], 1) * given["whole"]

    trained(smp, out, Net(Named()))


@program(**ON_RANKS)
def part_without_gradient_changes(smp: Any, out: Any) -> None:
    """The second result is a detached view."""

    class Detached(Parts):
        def parts(self, h: Tensor) -> Any:
            return h, h.detach()[:, :3]

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            whole, part = given
            part.mul_(2.0)
            return whole + part.repeat(1, 2)

    trained(smp, out, Net(Detached()))


@program(**ON_RANKS, refused="of which a view was made")
def part_changes_by_another_stage(smp: Any, out: Any) -> None:
    """What is added is made on another stage, where the change is then made on a copy."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            added = self.after(given["whole"] * 1.0)
            given["whole"].add_(added)
            return torch.cat([given["right"], given["left"]], 1)

    trained(smp, out, Net(Named()))


@program(**ON_RANKS)
def counts(smp: Any, out: Any) -> None:
    """Each microbatch takes the number as it is then."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            return given[0] * given[1].mean()

    trained(smp, out, Net(Counting()))


@program(**ON_RANKS)
def counts_by_view(smp: Any, out: Any) -> None:
    """The same, where it hands over a part of the buffer."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            return given[0] * given[1].mean()

    trained(smp, out, Net(CountingView()))


@program(**ON_RANKS)
def counts_seen_before(smp: Any, out: Any) -> None:
    """A number that was taken before the next call changes with that; a clone does not."""

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            h, count = given
            kept = count.clone()
            again, _ = self.middle(h)
            return again * count.mean() + kept.mean()

    trained(smp, out, Net(Counting()))


@program(**ON_RANKS)
def statistics_returned(smp: Any, out: Any) -> None:
    """Of a batch norm, as it changes them."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.norm(x), self.norm.running_mean

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            return given[0] + given[1]

    trained(smp, out, Net(Norm()))


@program(**ON_RANKS)
def constants_returned(smp: Any, out: Any) -> None:
    """A buffer that nobody changes is as good a result as any."""

    class Scaled(Counting):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x)), self.count[1]

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            return given[0] + given[1].repeat(2)

    trained(smp, out, Net(Scaled()))


class Passing(nn.Module):
    """Hands a part of its second argument on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), y[:, :1]


class Passed(nn.Module):
    """Gives a block a tensor that every rank has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.passing, self.after = TanhBlock(), Passing(), TanhBlock()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(6.0).expand(x.shape[0], 6).clone()
        return self.after(self.changed(self.before(x), mask))

    def changed(self, h: Tensor, mask: Tensor) -> Tensor:
        h, part = self.passing(h, mask)
        h = h + part
        del part
        mask.add_(1.0)  # nobody holds the view any more
        return h + mask


@program(**ON_RANKS)
def part_of_a_mask(smp: Any, out: Any) -> None:
    """A view of the root's own tensor goes through a block."""
    trained(smp, out, Passed())


@program(**ON_RANKS, refused="is changed in place while a view of it is held")
def mask_changes(smp: Any, out: Any) -> None:
    """The view would have to follow."""

    class Net(Passed):
        def changed(self, h: Tensor, mask: Tensor) -> Tensor:
            h, part = self.passing(h, mask)
            mask.add_(1.0)
            return h + part

    trained(smp, out, Net())


@program(**ON_RANKS, refused="changes a view of a tensor that every rank has of its own")
def part_of_a_mask_changes(smp: Any, out: Any) -> None:
    """The mask would have to follow."""

    class Net(Passed):
        def changed(self, h: Tensor, mask: Tensor) -> Tensor:
            h, part = self.passing(h, mask)
            part.add_(1.0)
            return h + mask

    trained(smp, out, Net())


@program(**ON_RANKS, refused="changes a buffer that a module has returned")
def root_changes_a_returned_buffer(smp: Any, out: Any) -> None:
    """The next microbatch would have to see it."""

    class Constant(Counting):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x)), self.count

    class Net(Between):
        def changed(self, given: Any) -> Tensor:
            given[1].add_(1.0)
            return given[0] + given[1].mean()

    trained(smp, out, Net(Constant()))
