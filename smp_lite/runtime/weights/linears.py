"""Linear layers that are split without a function mode, which costs every torch function some microseconds.

Most parameters belong to :class:`torch.nn.Linear`. Once it is known that those of a layer can be split, the
layer's ``forward`` is another one while its segment runs: the same call on stand-ins for its parameters, and
what its ``W`` needs is noted. Where all that a segment splits are such layers it runs without the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .splitting import may_split

__all__ = ["LinearUse", "SplitLinear", "installed", "is_plain_linear"]


def is_plain_linear(module: nn.Module) -> bool:
    """Whether nothing but the class's own forward runs in it."""
    return type(module) is nn.Linear and "forward" not in module.__dict__


class SplitLinear:
    """The forward of one layer, for one list of actions.

    Args:
        module: the layer.
        took: hears of each use to which autograd has come.
    """

    __slots__ = ("_bias", "_took", "_weight", "module", "parameters")

    def __init__(self, module: nn.Linear, took: Callable[[Any, Tensor, bool], None]) -> None:
        self.module = module
        self._took = took
        self._weight = module.weight.detach()
        self._bias = None if module.bias is None else module.bias.detach()
        trained = module.bias is not None and module.bias.requires_grad
        self.parameters = (module.weight, module.bias) if trained else (module.weight,)

    def __call__(self, input: Tensor) -> Tensor:
        if (
            type(input) is not Tensor
            or not input.requires_grad
            or input.dim() < 2
            or not input.is_contiguous()
            or not may_split()
        ):
            return nn.Linear.forward(self.module, input)  # whole; or the mode, if it is there, splits it
        output = F.linear(input, self._weight, self._bias)
        node = output.grad_fn
        assert node is not None
        node.register_prehook(LinearUse(self, input, self._took).take)
        return output


class LinearUse:
    """One call of such a layer; as :class:`.splitting.Use`."""

    __slots__ = ("_input", "_owner", "_took", "_version", "gradient", "task")

    def __init__(self, owner: SplitLinear, input: Tensor, took: Callable[[Any, Tensor, bool], None]) -> None:
        self._owner, self._input, self._took = owner, input, took
        self._version = input._version
        self.gradient: Tensor | None = None
        self.task = -1

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._owner.parameters

    def take(self, found: tuple[Tensor | None, ...]) -> None:
        if found[0] is not None:
            self._took(self, found[0], True)

    def made(self) -> tuple[Tensor, ...]:
        gradient, input = self.gradient, self._input
        assert gradient is not None
        rows = gradient.reshape(-1, gradient.shape[-1])
        with torch.no_grad():
            found = rows.t().mm(input.reshape(-1, input.shape[-1]))
            if len(self._owner.parameters) == 1:
                return (found,)
            # Up to three dimensions torch adds the bias within the product, else after it.
            return found, (rows if input.dim() < 4 else gradient).sum_to_size((gradient.shape[-1],))

    def is_as_it_was(self) -> bool:
        return self._input._version == self._version


@contextlib.contextmanager
def installed(linears: Iterable[SplitLinear], mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Around the forward of a segment: its layers are split, and ``mode`` is entered."""
    taken = [linear for linear in linears if is_plain_linear(linear.module)]
    for linear in taken:
        linear.module.__dict__["forward"] = linear
    try:
        with mode:
            yield
    finally:
        for linear in taken:
            linear.module.__dict__.pop("forward", None)
