"""Layer norm, inside a distributed block and by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..autocast import cast_for_norm
from ..one_d.operations import copy_to_ranks, sum_over_ranks
from .base import DistributedModule

__all__ = ["DistributedLayerNorm"]


class DistributedLayerNorm(DistributedModule, nn.LayerNorm):
    """Layer norm of what lies in a distributed block, or anywhere else.

    In a block, with ``optimize: "memory"``, a rank has ``H / T`` features and as much of ``weight`` and
    ``bias``; the ranks sum up mean and variance, of one number for each token. With ``"speed"`` all have all,
    and so it is torch's. In a model of the script's own it is torch's, of whole features of the rank's batch.

    Args:
        normalized_shape: H.
        eps: added to the variance.
        inside: it is part of a distributed block, as those of this library's blocks are.
    """

    elementwise_affine = True

    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, inside: bool = False) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps  # type: ignore[assignment]
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.inside = inside
        if self.splits_features:
            self.region.check_shares("DistributedLayerNorm: normalized_shape", normalized_shape)
            self.share({"weight": 0, "bias": 0})
        else:
            self.share({})
            if inside:
                self.note_all_batches(("weight", "bias"))

    @property
    def splits_features(self) -> bool:
        """Whether a rank has its part of the features here."""
        return self.inside and self.region.splits_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.splits_features:
            weight, bias = self.weight, self.bias
            if self.inside:
                weight, bias = self.region.of_all_batches(weight), self.region.of_all_batches(bias)
            return F.layer_norm(input, (self.normalized_shape,), weight, bias, self.eps)
        given = cast_for_norm(input)
        x = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        centred = x - self._mean(x)
        variance = self._mean(centred * centred)
        # Rounded once, as torch's; under autocast the parameters are wider than the result.
        return (centred * (variance + self.eps).rsqrt() * self.weight + self.bias).to(given.dtype)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks' features; each rank uses it for its own part, so its gradient is summed too."""
        axis = self.region.axis
        total = sum_over_ranks(x.sum(-1, keepdim=True), axis)
        return copy_to_ranks(total, axis) / self.normalized_shape

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, ranks={self.region.axis.size}"
