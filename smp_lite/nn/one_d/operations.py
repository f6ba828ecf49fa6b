"""What the layers split over one axis do with activations: differentiable collectives.

Each is one of a pair, whose backward is the other one, so gradients of gradients are right too
(Shoeybi et al. 2019, "Megatron-LM", section 3, names the first pair f and g; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, the others):

====================================  ====================  ========================================
operation                             forward               backward
====================================  ====================  ========================================
``copy_to_ranks``                     nothing               all-reduce
``sum_over_ranks``                    all-reduce            nothing
``gather_along(gradients="same")``    all-gather            takes this rank's part
``split_along``                       takes a part          all-gather
``gather_along(gradients="summand")`` all-gather            reduce-scatter
``reduce_scatter_along``              reduce-scatter        all-gather
====================================  ====================  ========================================

Which one is right depends on the gradient that comes back to a tensor which all ranks hold whole. Where all
ranks go on with the same computation they all get the *same*, whole gradient. Where each goes on with its own
part of the work (its columns of a weight), each gets one *summand* of it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ...comm.groups.axis import Axis
from ..transforms import refuse_transforms

__all__ = ["copy_to_ranks", "gather_along", "reduce_scatter_along", "split_along", "sum_over_ranks"]


def copy_to_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Hands a tensor that all ranks hold to work that is split over them.

    The ranks' gradients are summands of the whole one: backward adds them up.
    """
    return x if axis.size == 1 else _apply(_Copy, x, axis)


def sum_over_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of the ranks' tensors, on all of them; each then has the same gradient, which is its own."""
    return x if axis.size == 1 else _apply(_Sum, x, axis)


def gather_along(
    x: torch.Tensor, axis: Axis, dim: int, *, gradients: Literal["same", "summand"]
) -> torch.Tensor:
    """The ranks' parts, of one shape, one after another along ``dim``.

    Args:
        gradients: what each rank will get as the gradient of the result. ``same``: the whole one, since all
            ranks do the same with the result. ``summand``: what its own share of the work contributes.
    """
    if gradients not in ("same", "summand"):
        raise ValueError(f"gradients={gradients!r}: it is 'same' or 'summand'")
    if axis.size == 1:
        return x
    return _apply(_GatherSame if gradients == "same" else _GatherSummand, x, axis, dim)


def split_along(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's equal part along ``dim`` of a tensor that all ranks hold; its gradient is whole again.

    Raises:
        ValueError: the size of that dimension is no multiple of the number of ranks.
    """
    return x if axis.size == 1 else _apply(_Split, x, axis, dim)


def reduce_scatter_along(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's equal part along ``dim`` of the sum of the ranks' tensors.

    Raises:
        ValueError: the size of that dimension is no multiple of the number of ranks.
    """
    return x if axis.size == 1 else _apply(_ReduceScatter, x, axis, dim)


def _apply(operation: type[torch.autograd.Function], x: torch.Tensor, *how: Any) -> torch.Tensor:
    refuse_transforms(x)
    found: torch.Tensor = operation.apply(x, *how)
    return found


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grad, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Copy.apply(grad, ctx.axis), None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Split.apply(grad, ctx.axis, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.part(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _GatherSame.apply(grad, ctx.axis, ctx.dim), None, None


class _GatherSummand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _ReduceScatter.apply(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _GatherSummand.apply(grad, ctx.axis, ctx.dim), None, None
