"""The linear layers inside transformer blocks: from a block's features to this rank's heads or
intermediate features, and back (Shoeybi et al. 2019, "Megatron-LM", section 3; with split features
as Korthikanti et al. 2022, section 4.2.2, along another dimension)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ...comm.groups.axis import Axis
from ..autocast import cast_for_autocast
from ..one_d.operations import copy_to_ranks, reduce_scatter_along, sum_over_ranks
from ..transforms import refuse_transforms
from .base import DistributedModule
from .region import Region

__all__ = ["FromParts", "ToParts", "initialise", "project"]


class ToParts(DistributedModule):
    """Weight ``(out / T, in)`` and bias ``(out / T)`` of a linear layer split by output features; called by
    :func:`project`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias)
        self.weight, self.bias = whole.weight, whole.bias

    def split(self) -> None:
        """Keeps this rank's part."""
        self.share({"weight": 0, "bias": 0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, (self,), self.region)[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class FromParts(DistributedModule):
    """A linear layer split by input features: weight ``(out, in / T)``, and the sum over the ranks.

    With split features the result is this rank's part of them, and the bias is split too; else it is whole.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias)
        self.weight, self.bias = whole.weight, whole.bias

    def split(self) -> None:
        """Keeps this rank's part."""
        self.share({"weight": 1, "bias": 0 if self.region.splits_features else None})
        if not self.region.splits_features:
            self.note_all_batches(("bias",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self.region.axis
        summand = F.linear(x, self.weight)
        if self.region.splits_features:
            found = reduce_scatter_along(summand, axis, -1)
            return _with_bias(found, self.bias)
        found = sum_over_ranks(summand, axis)
        return _with_bias(found, None if self.bias is None else self.region.of_all_batches(self.bias))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def project(x: torch.Tensor, layers: Sequence[ToParts], region: Region) -> list[torch.Tensor]:
    """This rank's output features of several layers with one input, which is brought together once."""
    if not region.splits_features:
        copied = copy_to_ranks(x, region.axis)
        return [F.linear(copied, layer.weight, layer.bias) for layer in layers]
    refuse_transforms(x)
    weights = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    sizes = [layer.weight.shape[0] for layer in layers]
    found = _GatheredLinear.apply(x, weights, region.axis).split(sizes, -1)
    return [_with_bias(part, layer.bias) for part, layer in zip(found, layers, strict=True)]


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + cast_for_autocast(bias)[0]


def initialise(module: nn.Module, stddev: float) -> None:
    """Draws the weights of all linear layers inside from a normal distribution, biases zero; before they
    are split."""
    for part in module.modules():
        if isinstance(part, ToParts | FromParts):
            nn.init.normal_(part.weight, 0.0, stddev)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class _GatheredLinear(torch.autograd.Function):
    """A linear layer of features that the ranks have parts of: keeps this rank's part alone, and gathers them
    again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x, weight)
        return F.linear(axis.all_gather(x, -1), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.axis.reduce_scatter(grad @ weight.to(grad.dtype), -1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            whole = ctx.axis.all_gather(x, -1).to(grad.dtype)
            grad_weight = (grad.flatten(0, -2).mT @ whole.flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight, None
