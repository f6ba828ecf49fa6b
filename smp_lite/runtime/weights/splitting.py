"""The calls of a segment that runs forward, as a function mode sees them: split, watched or left alone.

A split call runs on stand-ins for its parameters, so that autograd gives the gradient of its input only. A
hook on its node takes the gradient of its output, after every hook on the output itself has had its say.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...devices import CPU
from ...record.values.meant import meant
from .rules import RULES, Call, Gradients, is_plain

__all__ = ["Owner", "SplitCalls", "Use", "may_split"]


class Use:
    """One call that has a rule.

    Autograd's node of the call holds it, and results of the step may hold the node for long.

    Attributes:
        parameters: those that get their gradients from it.
        is_done: they have them.
        gradient: of its output, once autograd has come to it.
        gradient_version: what it counted by then.
        task: autograd's number of the backward that gave it.
    """

    __slots__ = (
        "_gradients",
        "_reads",
        "_versions",
        "gradient",
        "gradient_version",
        "is_done",
        "parameters",
        "task",
    )

    def __init__(self, call: Call, gradients: Gradients) -> None:
        self.parameters, self._gradients = call.parameters, gradients
        self._reads, self._versions = call.reads, [tensor._version for tensor in call.reads]
        self.is_done = False
        self.gradient: Tensor | None = None
        self.gradient_version = 0
        self.task = -1

    def made(self) -> tuple[Tensor, ...]:
        """The gradients of the parameters."""
        assert self.gradient is not None
        with torch.no_grad():
            return self._gradients(self.gradient)

    def is_as_it_was(self) -> bool:
        """Whether what the call has read, and its gradient, have not been changed in place."""
        gradient = self.gradient
        if gradient is not None and gradient._version != self.gradient_version:
            return False
        return all(t._version == v for t, v in zip(self._reads, self._versions, strict=True))

    def release(self) -> None:
        """Its parameters have their gradients: what the call has read may go."""
        self.gradient, self._reads, self._versions = None, (), []
        self._gradients, self.is_done = _nothing, True


def _nothing(gradient: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("the gradients have been made")


class Owner(Protocol):
    """Who decides about calls."""

    def splits(self, call: Call) -> bool:
        """Whether it is split."""

    def watches(self, call: Call) -> bool:
        """Of one that stays whole, whether its gradient is to be compared."""

    def took(self, use: Use, gradient: Tensor, split: bool) -> None:
        """Autograd has come to the call."""


class SplitCalls(TorchFunctionMode):
    """Sees the calls of torch functions while a segment runs."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        self._anchor = torch.zeros((), requires_grad=True, device=CPU)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, meant(func)
        rule = RULES.get(func)
        if rule is None or not may_split():
            return func(*args, **kwargs)
        call = rule(*args, **kwargs)
        if call is None or not is_plain(call.input):
            return func(*args, **kwargs)
        if self._owner.splits(call):
            if call.input.requires_grad:
                output, gradients = call.run(_apart)
            else:
                found: list[Gradients] = []
                output = _Source.apply(self._anchor, call, found)
                (gradients,) = found
            self._follow(output, Use(call, gradients), split=True)
            return output
        output = func(*args, **kwargs)
        if self._owner.watches(call) and output.grad_fn is not None:
            with torch.no_grad():
                _, gradients = call.run(_apart)  # rules keep what the forward works out
            self._follow(output, Use(call, gradients), split=False)
        return output

    def _follow(self, output: Tensor, use: Use, *, split: bool) -> None:
        took = self._owner.took

        def take(found: tuple[Tensor | None, ...]) -> None:
            if found[0] is not None:
                took(use, found[0], split)

        assert output.grad_fn is not None
        output.grad_fn.register_prehook(take)


class _Source(torch.autograd.Function):
    """A call of which nothing but parameters wants a gradient: its output does, all the same."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, found: list[Gradients]) -> Tensor:
        output, gradients = call.run(_apart)
        found.append(gradients)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _apart(tensor: Any) -> Any:
    """What stands for a parameter: the same memory, which autograd does not follow."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) and tensor.requires_grad else tensor


def may_split() -> bool:
    """Whether nothing is in force that looks into what autograd keeps, or changes what functions do."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._is_any_autocast_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch._C._are_functorch_transforms_active()
    )
