"""``smp.nn.FusedLayerNorm``: torch's own layer norm under SMP v1's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["FusedLayerNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm with the signature of SMP v1's and NVIDIA apex's.

    It is torch's LayerNorm, by type too: what sorts parameters into groups with and without weight decay asks
    ``isinstance`` for one or the other, transformers for torch's and AWS's scripts for this one, and a layer
    made here answers to both. Torch has a fused kernel itself, so nothing is added; parameters, state dicts
    and results are the same.

    Args:
        normalized_shape: the last dimensions of the input, over which it normalizes; a number: the last one.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: False: a weight alone.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        # By name only: apex has another option in fourth place, which must not pass for this one.
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias=bias, device=device, dtype=dtype)
