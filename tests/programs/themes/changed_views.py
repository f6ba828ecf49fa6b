"""Changes in place by way of views: of ordinary tensors, buffers, weights, detached values; ``no_grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock, trained

ON_RANKS = {"stages": (2, 3), "ranks": (2,)}


def blocks(number: int = 3) -> list[TanhBlock]:
    return [TanhBlock() for _ in range(number)]


class Chain(nn.Module):
    """Blocks; a subclass does something before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](self.between(x) + 0.1)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@program(**ON_RANKS)
def rows_of_sums(smp: Any, out: Any) -> None:
    """Sums over the job, of which parts are changed: by views that nobody keeps, and by one that is kept."""
    names = ("passing", "kept", "operator", "copied", "slice", "reshaped", "data", "numpy", "twice")
    sums = {name: torch.zeros(2, 3) for name in names}
    array = sums["numpy"].numpy()

    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        value = loss.detach()
        sums["passing"][0].add_(value)
        row = sums["kept"][1]
        row.add_(value).mul_(0.5)
        sums["operator"][0] += value
        sums["copied"][0, 1:].copy_(value)
        sums["slice"][:, :2].add_(value)
        sums["reshaped"].view(-1).add_(value)
        sums["data"].data.add_(value)
        sums["numpy"].add_(value)
        first, second = sums["twice"][0], sums["twice"][0, 1:]
        first.add_(value)
        second.mul_(value + 2)
        sums["twice"].add_(first.sum())
        return loss

    trained(smp, out, nn.Sequential(*blocks()), step)
    out.value("sums", list(sums.values()))
    out.value("array", torch.from_numpy(array.copy()))


@program(**ON_RANKS)
def filled_by_parts(smp: Any, out: Any) -> None:
    """A tensor that the root makes and fills part by part, with a gradient."""

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            whole = torch.zeros(x.shape[0], 2, 6)
            whole[:, 0, :3].copy_(x[:, :3])
            whole[:, 0].narrow(1, 3, 3).add_(x[:, 3:])
            right = whole[:, 1]
            right.copy_(x * 2).mul_(x)
            return whole.sum(1)

    trained(smp, out, Net())


@program(**ON_RANKS)
def buffers_by_parts(smp: Any, out: Any) -> None:
    """A queue, running means and an ``out=``: parts of buffers of the root."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("means", torch.zeros(2, 6))
            self.register_buffer("queue", torch.zeros(6, 16))
            self.register_buffer("latest", torch.zeros(2, 6))
            self.register_buffer("total", torch.zeros(6))
            self.at = 0

        def between(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.means[1].mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.queue[:, self.at : self.at + x.shape[0]].copy_(x.T)
                torch.mean(x, 0, out=self.latest[0])
                self.total.data.mul_(0.5).add_(x.sum(0))
            self.at = (self.at + x.shape[0]) % 16
            return x + self.means.sum(0) + self.queue.mean(1) + self.latest[0] + self.total

    trained(smp, out, Net())


def _under_no_grad(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def changed(x: Tensor) -> None:
        with torch.no_grad():
            change(x)

    return changed


CHANGES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.detach().mul_(0.5),
    lambda x: x.data.clamp_(-0.5, 0.5),
    lambda x: x.detach()[0].zero_(),
    lambda x: x.data.__setitem__(0, 0.25),
    _under_no_grad(lambda x: x.mul_(0.5)),
    _under_no_grad(lambda x: x[0].mul_(0.5)),
)
"""The numbers change; the gradient is what it would be without."""


@program(ranks=(2,), static=True, parameters={"auto_partition": False, "default_partition": 0})
def numbers_without_gradient(smp: Any, out: Any) -> None:
    """Values that go to another stage, whose numbers are changed behind autograd's back, in several ways."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks(len(CHANGES) + 1))
            for number, block in enumerate(self.blocks):
                smp.set_partition(block, number % 2)

        def forward(self, x: Tensor) -> Tensor:
            for block, change in zip(self.blocks, CHANGES, strict=False):
                x = block(x) * 1.5
                change(x)
            return self.blocks[-1](x)

    trained(smp, out, Net())


@program(**ON_RANKS)
def target_before_a_change(smp: Any, out: Any) -> None:
    """What was detached before a change shows the new numbers and has no gradient."""

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            x = x * 1.0
            target, row = x.detach(), x[0]
            x.mul_(0.5)
            out.value("whether they require a gradient", [target.requires_grad, row.requires_grad])
            return (x - target) ** 2 + row

    trained(smp, out, Net())


@program(**ON_RANKS)
def changed_after_a_look(smp: Any, out: Any) -> None:
    """Under ``no_grad``, after Python has looked at it, or by a result of the next block."""

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            x, kept = x * 1.0, x * 1.5
            if torch.isnan(x).any():
                raise ValueError("not a number")
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            y = x + kept
            scale = self.blocks[0](y).abs().mean()
            with torch.no_grad():
                y.mul_(scale)
            return torch.cat([y, kept], 0)[: len(y)] + y

    trained(smp, out, Net())


@program(**ON_RANKS)
def momentum_by_data(smp: Any, out: Any) -> None:
    """A momentum encoder whose weights follow by way of ``.data`` and ``detach()`` in the root's forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Sequential(*blocks(2))
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.head = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    key.data.mul_(0.9).add_(query.data, alpha=0.1)
                    key.data.copy_(0.9 * key.data + 0.1 * query.data)
                    key.detach().lerp_(query.detach(), 0.1)
                    key[0].mul_(0.99)
                target = self.key(x)
            return self.head(self.query(x)) - target

    trained(smp, out, Net())


@program(**ON_RANKS)
def made_by_weights_outside(smp: Any, out: Any) -> None:
    """What weights outside of the model have made is changed, whole and in part, and keeps its gradient."""
    first, second = (torch.linspace(0.5, 1.5, 12).view(2, 6).requires_grad_() for _ in range(2))

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            whole, rows = first * 2, second * 3
            whole.add_(x.mean(0))
            rows[0].add_(x.mean(0))
            with torch.no_grad():
                rows[1].mul_(x.abs().mean())
            return x + whole.sum(0) + rows.sum(0)

    trained(smp, out, Net())
    out.value("gradients of the weights", [first.grad, second.grad])


@program(ranks=(2,), parameters={"auto_partition": False, "default_partition": 0})
def bias_before_and_after(smp: Any, out: Any) -> None:
    """A frozen bias that is added to values of another stage, before and after each of its changes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks(2))
            self.shift = nn.Linear(6, 6).requires_grad_(False)
            smp.set_partition(self.blocks[1], 1)

        def forward(self, x: Tensor) -> Tensor:
            bias = self.shift.bias
            x = self.blocks[1](self.blocks[0](x)) + bias
            with torch.no_grad():
                bias.add_(1.0)
            x = self.blocks[1](x) + bias
            with torch.no_grad():
                bias.data.mul_(0.5)
            return x + bias

    trained(smp, out, Net())


@program(**ON_RANKS, refused="where it lies in memory is not known")
def place_in_memory(smp: Any, out: Any) -> None:
    """Of a view it is another than of a tensor of that form."""

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            return x * (1 + x[:, 2:].storage_offset())

    trained(smp, out, Net())


@program(**ON_RANKS, refused="_base was asked of a value of a step")
def base_of_a_view(smp: Any, out: Any) -> None:
    """There is none before it is made."""

    class Net(Chain):
        def between(self, x: Tensor) -> Tensor:
            return x * (2.0 if x[:, 2:]._base is x else 1.0)

    trained(smp, out, Net())
