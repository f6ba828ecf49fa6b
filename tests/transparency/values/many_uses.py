"""What the ranks run for the tests of values that calls on several stages use, some more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models import Batch
from tests.models.layers import regression_batch
from tests.transparency.rounds import Round, assert_rounds_equal

__all__ = ["MODELS", "train"]

_WIDTH = 16


class Twice(nn.Module):
    """Uses what it is given two times, so that its gradient is a sum already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.linear(x))


class _Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Twice() for _ in range(4))


class SkipsOverStages(_Four):
    """As in a U-Net: what the first block makes is used by the next one and by the last."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(h)
        return self.d(self.c(k) + k) + h


class OneSource(_Four):
    """As in cross attention: all later blocks use it."""

    def forward(self, x: Tensor) -> Tensor:
        source = self.a(x)
        y = self.b(source)
        y = self.c(y * source)
        return self.d(y * source + source)


class Branches(_Four):
    """Blocks of several stages that do not need each other, in turn."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) + self.c(h) + self.d(h) + self.b(h * 2) + self.c(h)


class SharedBlock(_Four):
    """A block, and with it its parameters, between those of other stages again and again."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.b, self.c, self.d):
            x = self.a(self.a(block(self.a(x))))
        return x


class SharedAcrossADecision(_Four):
    """Its own parts, run at once since Python asks for their numbers, have nothing to do with each other."""

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for part in x.chunk(3, dim=-1):
            parts.append(self.a(F.pad(part, (0, _WIDTH - part.shape[-1]))))
            assert float(parts[-1].detach().abs().sum()) > 0
        return self.d(self.c(self.b(torch.stack(parts).sum(0)) + parts[1]))


class Returned(_Four):
    """What its backward begins with is used by others too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h, self.c(self.b(h) * h) + self.d(h)


class Mix(Twice):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y * x


class LooksAtAJoin(_Four):
    """What has run already, since Python asks for its numbers, stays in the segments that it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Mix()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        p = self.b(h, h)
        r = self.b(self.c(h), h)
        assert float(r.detach().abs().sum()) > 0
        return self.d(p + r) + h


class Borrowed(_Four):
    """The root uses a parameter of a block's itself, before and after the block does."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.b.linear.bias
        h = self.c(torch.tanh(self.a(x) + bias)) * bias
        h = self.d(self.b(h + bias) * bias)
        return self.c(h * bias.exp()) - bias * bias


class BorrowedBeforeADecision(_Four):
    """What has run when Python asks for a number did not know that gradients of its parameters come back."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.b.linear.bias
        h = self.a(x)
        h = h * bias + h.exp() * bias
        assert float(h.detach().abs().sum()) > 0
        return self.d(self.c(self.b(h) * bias))


class Same(Twice):
    """Asks whether what it is given is one tensor, as torch's attention does of keys and values."""

    def forward(self, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return super().forward(x * p) + (q if p is q else q * 2)


class GivenTwice(_Four):
    """A parameter of the root's own, and one of a block's, given to one call twice."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = Same(), Same()
        self.spare = Twice()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x), self.scale, self.scale)
        bias = self.spare.linear.bias
        return self.d(self.c(h, bias, bias))


class RootsOwn(_Four):
    """Parameters that no block holds, used several times before and after calls of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, _WIDTH))
        self.mix = nn.Parameter(torch.eye(_WIDTH) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x * self.scale) * self.scale
        h = F.linear(self.a(F.linear(h, self.mix)), self.mix) * self.scale
        h = self.b(h) * self.scale
        h = self.d(F.linear(self.c(h), self.mix) * self.scale)
        return F.linear(h, self.mix) * self.scale.exp()


class Holding(nn.Module):
    """A block that calls a layer which others hold as well, as their own."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.linear(x)))


class HeldBySeveral(_Four):
    """As relative positions in CoaT's blocks: the root has named the layer before the blocks that call it."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c, self.d = (Holding(self.a) for _ in range(3))
        self.blocks = nn.ModuleList([Holding(self.a), self.b, self.c, self.d, Holding(self.a)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class HeldByTheFirst(_Four):
    """The blocks alone hold the layer, so it has its name from the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Holding(Twice())
        self.b, self.c, self.d = (Holding(self.a.shared) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class SeenWithoutGradient(_Four):
    """A view that was made under ``no_grad`` says that it wants a gradient, and hands none on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            seen = h.t().t()
        return self.d(self.b(seen) + self.c(h))


MODELS = {
    model.__name__: model
    for model in (
        SkipsOverStages,
        OneSource,
        Branches,
        SharedBlock,
        SharedAcrossADecision,
        Returned,
        LooksAtAJoin,
        Borrowed,
        BorrowedBeforeADecision,
        GivenTwice,
        RootsOwn,
        HeldBySeveral,
        HeldByTheFirst,
        SeenWithoutGradient,
    )
}


def loss_of(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    output = model(batch["x"])
    if isinstance(output, Tensor):
        loss = F.mse_loss(output, batch["target"])
        backward(loss)
        return loss
    first, last = output
    loss = F.mse_loss(last, batch["target"])
    backward([first, loss], [torch.cos(batch["target"]), None])
    return first, loss


def train(name: str, homes: str) -> None:
    """Raises AssertionError where what this rank holds is not that of one process.

    Args:
        name: of the model.
        homes: the stage of each of its blocks, a digit each.
    """
    smp.init()
    rounds = [Round(loss_of, regression_batch(8))] * 3
    assert_rounds_equal(MODELS[name], rounds, dict(zip("abcd", map(int, homes), strict=True)))
