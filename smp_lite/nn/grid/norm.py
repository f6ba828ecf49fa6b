"""Norms over features that lie over one axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...comm.groups.axis import Axis
from ..autocast import cast_for_norm
from ..transforms import refuse_transforms
from .checks import check_features, compute_dtype
from .laid_out import LaidOut

__all__ = ["SplitLayerNorm", "SplitRMSNorm", "check_norm", "normalize"]


def normalize(x: torch.Tensor, axis: Axis, eps: float | None, centered: bool) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps)``, or without the mean (Zhang and Sennrich 2019, "Root Mean Square
    Layer Normalization", arXiv 1910.07467).

    Mean and variance are taken in 32 bits at least, and so is the result. The variance is that of the
    differences from the mean, not a difference of squares. Each costs one all-reduce of one number a row;
    backward costs one, of two numbers a row.

    Args:
        x: ``(..., features / ranks)``.
        axis: over which the features lie.
        eps: None: the machine epsilon of the input's dtype, as torch's RMSNorm has it.
        centered: whether the mean is taken off.
    """
    refuse_transforms(x)
    found: torch.Tensor = _Normalize.apply(
        x, axis, torch.finfo(x.dtype).eps if eps is None else eps, centered
    )
    return found


def check_norm(dense: nn.LayerNorm | nn.RMSNorm) -> int:
    """The number of features.

    Raises:
        ValueError: it normalizes over several dimensions.
    """
    if len(dense.normalized_shape) != 1:
        raise ValueError(
            f"{type(dense).__name__} over {list(dense.normalized_shape)}: only a norm over the last "
            "dimension can be split over ranks"
        )
    return int(dense.normalized_shape[0])


class _SplitNorm(LaidOut):
    """What both kinds share; a grid says where features and parameters lie."""

    features: int
    eps: float | None

    def _features_axis(self) -> Axis:
        """The axis over which the features lie."""
        raise NotImplementedError  # each layer's own

    def _here(self, vector: torch.Tensor) -> torch.Tensor:
        """Of a parameter, what this rank's features need."""
        raise NotImplementedError  # each layer's own

    def _normalized(self, x: torch.Tensor, centered: bool) -> torch.Tensor:
        check_features(type(self).__name__, x, self.features // self._features_axis().size, self.features)
        found = normalize(x, self._features_axis(), self.eps, centered)
        return found if self.weight is None else found * self._here(self.weight)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"


class SplitLayerNorm(_SplitNorm):
    """``torch.nn.LayerNorm`` over features that lie over one axis."""

    dense_type = nn.LayerNorm
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = cast_for_norm(input)
        found = self._normalized(input, True)
        return (found if self.bias is None else found + self._here(self.bias)).to(input.dtype)

    def to_dense(self) -> nn.LayerNorm:
        """The whole layer, on all ranks; collective."""
        affine, bias = self.weight is not None, self.bias is not None
        dense = nn.LayerNorm(self.features, self.eps, affine, bias, device="meta")
        self._give(dense)
        return dense


class SplitRMSNorm(_SplitNorm):
    """``torch.nn.RMSNorm`` over features that lie over one axis."""

    dense_type = nn.RMSNorm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = cast_for_norm(input, F.rms_norm)
        return self._normalized(input, False).to(input.dtype)

    def to_dense(self) -> nn.RMSNorm:
        """The whole layer, on all ranks; collective."""
        dense = nn.RMSNorm(self.features, self.eps, self.weight is not None, device="meta")
        self._give(dense)
        return dense


class _Normalize(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, eps: float, centered: bool) -> torch.Tensor:
        ctx.axis, ctx.centered, ctx.dtype = axis, centered, x.dtype
        ctx.features = x.shape[-1] * axis.size
        work = x.to(compute_dtype(x.dtype))
        if centered:
            work = work - axis.all_reduce(work.sum(-1, keepdim=True)) / ctx.features
        variance = axis.all_reduce(work.square().sum(-1, keepdim=True)) / ctx.features
        scale = (variance + eps).rsqrt()
        result = work * scale
        ctx.save_for_backward(result, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        result, scale = ctx.saved_tensors
        sums = [(grad * result).sum(-1, keepdim=True)]
        if ctx.centered:
            sums.append(grad.sum(-1, keepdim=True))
        along, *mean = (ctx.axis.all_reduce(torch.stack(sums)) / ctx.features).unbind()
        found = grad - result * along
        for part in mean:
            found = found - part
        return (found * scale).to(ctx.dtype), None, None, None
