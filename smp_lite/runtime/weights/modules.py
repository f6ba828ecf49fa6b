"""The modules that hold split parameters, and what their forward is meanwhile.

A function mode costs every torch function some microseconds. So once it is known what can be split, the mode
is there only while a module runs that holds such parameters itself; and most of these are plain
:class:`torch.nn.Linear`, which do without: their ``forward`` is the same call on stand-ins for the
parameters, and notes what their ``W`` needs. Where a parameter is used outside its holder's forward, it is
used whole.

Code of the model may look at its modules meanwhile, so what is in the place of a forward is a method of the
module too, with the same signature, and a copy of the module has one that uses the copy's own parameters.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from .accumulating import node_is_held
from .rules import LINEAR, is_plain
from .splitting import may_split

__all__ = ["Forward", "LinearUse", "installed", "split_forwards", "without_hooks"]

_LINEAR_FILE = torch.nn.modules.linear.__file__

Forward = tuple[nn.Module, Callable[..., Any]]
"""A module, and what its forward is while its segment runs."""


def split_forwards(
    modules: Iterable[nn.Module],
    deferred: frozenset[int],
    took: Callable[[Any, Tensor, bool], None],
    mode: contextlib.AbstractContextManager[Any],
) -> list[Forward]:
    """For each module that holds parameters to split.

    Args:
        modules: all of a segment.
        deferred: ids of the parameters.
        took: hears of each use to which autograd has come.
        mode: splits the calls of those that are no plain linear layers.
    """
    found: list[Forward] = []
    for module in modules:
        own = {id(p) for p in module._parameters.values() if p is not None and p.requires_grad}
        if "forward" in module.__dict__ or own.isdisjoint(deferred):
            continue  # somebody else has put another forward there
        if _is_own_linear(module) and own <= deferred and module.weight.requires_grad:
            found.append((module, types.MethodType(SplitLinear(module, took, mode), module)))
        else:
            found.append((module, types.MethodType(_within(mode, type(module).forward), module)))
    return found


def without_hooks(
    parameters: Mapping[int, nn.Parameter], modules: Iterable[nn.Module]
) -> dict[int, nn.Parameter]:
    """Those that no hooks listen to: on themselves, on autograd's nodes that add up their gradients, or on
    the backward of a module that they are in.

    Args:
        parameters: by id.
        modules: all that use them.
    """
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return {}
    hooked = [m for m in modules if m._backward_hooks or m._backward_pre_hooks]
    inside = {id(p) for module in hooked for p in module.parameters()}
    return {
        number: p
        for number, p in parameters.items()
        if number not in inside
        and not p._backward_hooks
        and not p._post_accumulate_grad_hooks
        and not node_is_held(p)
    }


def _is_own_linear(module: nn.Module) -> bool:
    """Whether its forward is torch's own, and calls torch's own function: scripts patch both."""
    if type(module) is not nn.Linear or not module.weight.is_contiguous():
        return False
    return _is_linear_own()


def _is_linear_own() -> bool:
    if F.linear is not LINEAR:
        return False
    code = getattr(nn.Linear.forward, "__code__", None)
    return code is not None and code.co_filename == _LINEAR_FILE


def _within(mode: contextlib.AbstractContextManager[Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(module, *args, **kwargs)

    return run


class SplitLinear:
    """The forward of one layer, for one list of actions: the function of a method.

    Args:
        module: the layer.
        took: hears of each use to which autograd has come.
        mode: splits the calls that this does not: of inputs without a gradient, which are not contiguous.
    """

    __slots__ = ("_bias", "_mode", "_module", "_took", "_weight", "parameters")
    __name__ = "forward"

    def __init__(
        self,
        module: nn.Linear,
        took: Callable[[Any, Tensor, bool], None],
        mode: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._module = module
        self._took, self._mode = took, mode
        self._weight, self._bias = module.weight, module.bias
        trained = module.bias is not None and module.bias.requires_grad
        self.parameters = (module.weight, module.bias) if trained else (module.weight,)

    def __call__(self, module: nn.Linear, input: Tensor) -> Tensor:
        if not _is_linear_own():
            return type(module).forward(module, input)  # patched since
        if (
            module is not self._module  # a copy, which code of the model has made
            or not is_plain(input)
            or not input.requires_grad
            or input.dim() < 2
            or not input.is_contiguous()
            or not may_split()
        ):
            return self._otherwise(module, input)
        weight, bias = module.weight, module.bias
        if weight is not self._weight or bias is not self._bias:
            return self._otherwise(module, input)  # with others in their places for this call
        output = LINEAR(input, weight.detach(), None if bias is None else bias.detach())
        node = output.grad_fn
        assert node is not None
        node.register_prehook(LinearUse(self, input, self._took).take)
        return output

    def _otherwise(self, module: nn.Linear, input: Tensor) -> Tensor:
        """Split if the mode splits it, since a list splits all calls of one form or none: where it goes on
        learning, one of them runs under the mode."""
        with self._mode:
            return nn.Linear.forward(module, input)


class LinearUse:
    """One call of such a layer; as :class:`.splitting.Use`."""

    __slots__ = ("_input", "_owner", "_took", "_version", "gradient", "gradient_version", "is_done", "task")

    def __init__(self, owner: SplitLinear, input: Tensor, took: Callable[[Any, Tensor, bool], None]) -> None:
        self._owner, self._took = owner, took
        self._input: Tensor | None = input
        self._version = input._version
        self.gradient: Tensor | None = None
        self.gradient_version = 0
        self.task = -1
        self.is_done = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._owner.parameters

    def take(self, found: tuple[Tensor | None, ...]) -> None:
        if found[0] is not None:
            self._took(self, found[0], True)

    def made(self) -> tuple[Tensor, ...]:
        gradient, input = self.gradient, self._input
        assert gradient is not None and input is not None
        rows = gradient.reshape(-1, gradient.shape[-1])
        with torch.no_grad():
            found = rows.t().mm(input.reshape(-1, input.shape[-1]))
            if len(self._owner.parameters) == 1:
                return (found,)
            # Up to three dimensions torch adds the bias within the product, else after it.
            return found, (rows if input.dim() < 4 else gradient).sum_to_size((gradient.shape[-1],))

    def is_as_it_was(self) -> bool:
        gradient = self.gradient
        is_gradient_same = gradient is None or gradient._version == self.gradient_version
        return is_gradient_same and self._input is not None and self._input._version == self._version

    def release(self) -> None:
        self.gradient = self._input = None
        self.is_done = True


@contextlib.contextmanager
def installed(forwards: Sequence[Forward]) -> Iterator[None]:
    """Around the forward of a segment."""
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            module.__dict__.pop("forward", None)
