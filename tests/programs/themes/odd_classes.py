"""Code that chooses what it does by the class of a tensor; classes that are not quite what they extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import TanhBlock, trained

ON_RANKS = {"stages": (2, 3), "ranks": (2,)}


class Between(nn.Module):
    """A subclass does something between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = TanhBlock(), TanhBlock()


@program(**ON_RANKS)
def chosen_by_module(smp: Any, out: Any) -> None:
    """As opt_einsum does: the library that computes is that of the operands. Numpy knows no gradients."""

    def outer(a: Tensor, b: Tensor) -> Any:
        if type(a).__module__.partition(".")[0] == "torch":
            return torch.einsum("bi,bj->bij", a, b)
        return torch.as_tensor(a.detach().numpy()[:, :, None] * b.detach().numpy()[:, None])

    class Net(Between):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            return self.after(outer(h, h).sum(2))

    trained(smp, out, Net())


@program(**ON_RANKS)
def numbers_that_want_a_gradient(smp: Any, out: Any) -> None:
    """``numpy()`` of what wants a gradient is an error of torch's, which code may expect."""

    class Net(Between):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            try:
                largest = h.numpy().max()
            except RuntimeError:
                largest = 2 * h.detach().numpy().max()
            return self.after(h * float(largest))

    trained(smp, out, Net())


class Signs(tuple[int, ...]):
    """As e3nn's representations: a tuple that is not meant to be one."""

    def __len__(self) -> int:
        raise NotImplementedError


@program(**ON_RANKS)
def tuples_without_a_length(smp: Any, out: Any) -> None:
    class Signed(TanhBlock):
        def __init__(self) -> None:
            super().__init__()
            self.signs = Signs((1, -1))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.signs
            return first * super().forward(x) + second * x

    trained(smp, out, nn.Sequential(TanhBlock(), Signed(), Signed()))
