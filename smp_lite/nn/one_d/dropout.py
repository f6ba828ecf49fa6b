"""Dropout of this rank's features, with the mask that the dense layer would draw."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...comm.groups.axis import Axis
from .parts import shallow_copy

__all__ = ["FeatureParallelDropout"]


class FeatureParallelDropout(nn.Dropout):
    """``torch.nn.Dropout`` between a column- and a row-parallel layer.

    All ranks draw the mask of all features, from the same random stream, and each applies its own part: the
    result is that of the dense layer, at the price of its time and memory for the mask.

    Args:
        p: as in ``torch.nn.Dropout``.
        axis: the ranks that share the features, the last dimension of the input.
    """

    def __init__(self, p: float = 0.5, *, axis: Axis) -> None:
        super().__init__(p)
        self.axis = axis

    @classmethod
    def from_dense(cls, dense: nn.Dropout, axis: Axis) -> FeatureParallelDropout:
        """
        Raises:
            ValueError: it works in place.
        """
        if dense.inplace:
            raise ValueError("FeatureParallelDropout: a torch.nn.Dropout with inplace=True is not supported")
        layer = shallow_copy(cls, dense)
        layer.axis = axis
        return layer

    def to_dense(self) -> nn.Dropout:
        """Torch's."""
        return nn.Dropout(self.p).train(self.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return input
        whole = input.new_ones((*input.shape[:-1], input.shape[-1] * self.axis.size))
        return input * self.axis.part(F.dropout(whole, self.p), -1)
