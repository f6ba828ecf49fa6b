"""Norms of a part of the tokens (Korthikanti et al. 2022, sequence parallelism).

They compute what torch's compute. Each rank's tokens give one summand of their weights' gradients, and their
layouts say so. On whole sequences torch's own norms are right as they are.
"""

from __future__ import annotations

import torch
from torch import nn

from ...comm.groups.axis import Axis
from .parts import SplitModule, layout_over, shallow_copy, whole

__all__ = ["SequenceParallelLayerNorm", "SequenceParallelRMSNorm"]


class _SequenceParallel(SplitModule):
    axis: Axis

    def split(self, axis: Axis) -> None:
        """Each rank has its own tokens from now on."""
        self.axis = axis
        self.keep_parts(
            {
                name: layout_over(parameter, axis, None, partial=True)
                for name, parameter in self.named_parameters(recurse=False)
            }
        )


class SequenceParallelLayerNorm(_SequenceParallel, nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the features of this rank's tokens; arguments as there, and the axis."""

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        axis: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.split(axis)

    @classmethod
    def from_dense(cls, dense: nn.LayerNorm, axis: Axis) -> SequenceParallelLayerNorm:
        """With a copy of the weights."""
        layer = shallow_copy(cls, dense)
        layer.split(axis)
        return layer

    def to_dense(self) -> nn.LayerNorm:
        """Torch's, with a copy of the weights."""
        affine, bias = self.elementwise_affine, self.bias is not None
        dense = nn.LayerNorm(list(self.normalized_shape), self.eps, affine, bias, device="meta")
        _copy(self, dense)
        return dense.train(self.training)


class SequenceParallelRMSNorm(_SequenceParallel, nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the features of this rank's tokens; arguments as there, and the axis."""

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        axis: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.split(axis)

    @classmethod
    def from_dense(cls, dense: nn.RMSNorm, axis: Axis) -> SequenceParallelRMSNorm:
        """With a copy of the weights."""
        layer = shallow_copy(cls, dense)
        layer.split(axis)
        return layer

    def to_dense(self) -> nn.RMSNorm:
        """Torch's, with a copy of the weights."""
        dense = nn.RMSNorm(list(self.normalized_shape), self.eps, self.elementwise_affine, device="meta")
        _copy(self, dense)
        return dense.train(self.training)


def _copy(source: nn.Module, target: nn.Module) -> None:
    for name, parameter in source.named_parameters(recurse=False):
        setattr(target, name, whole(parameter))
