"""``smp.nn.DistributedLinear``: split by input features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..autocast import cast_for_autocast
from ..one_d.operations import reduce_scatter_along, split_along, sum_over_ranks
from .base import DistributedModule
from .region import all_to_all

__all__ = ["DistributedLinear"]


class DistributedLinear(DistributedModule, nn.Linear):
    """``torch.nn.Linear`` split by input features over the tensor-parallel ranks.

    ``weight`` is this rank's ``(out_features, in_features / T)``, ``bias`` whole. Input ``(B, ...,
    in_features)`` and output ``(B, ..., out_features)`` are as of ``torch.nn.Linear``. Inside, a rank has its
    ``in_features / T`` of the N = T * B rows that the ranks bring, or with ``prescaled_batch`` of the B rows
    that they share; the partial products are summed, and without ``prescaled_batch`` each rank keeps its
    own rows.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``; weights are drawn as it
            draws them, and then split: the same seed gives the same layer at any degree.

    Raises:
        SMPError: ``smp.init()`` was not called.
        CannotShare: the ranks cannot share ``in_features`` equally; names the nearest sizes.
        ValueError: in forward, another number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.region.check_shares("DistributedLinear: in_features", in_features)
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        self.weight, self.bias = whole.weight, whole.bias
        self.share({"weight": 1})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        axis = self.region.axis
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"DistributedLinear: in_features={self.in_features}, and the input has shape "
                f"{list(input.shape)}"
            )
        if axis.size == 1:
            return F.linear(input, self.weight, self.bias)
        if self.region.own_batches:
            self.meet(input)
            rows = input if input.dim() > 1 else input.unsqueeze(0)  # a vector is a batch of one
            summand = F.linear(all_to_all(rows, axis, -1, 0), self.weight)
            output = reduce_scatter_along(summand, axis, 0)
            output = output if input.dim() > 1 else output.squeeze(0)
        else:
            output = sum_over_ranks(F.linear(split_along(input, axis, -1), self.weight), axis)
        return output if self.bias is None else output + cast_for_autocast(self.bias)[0]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self.region.axis.size}"
        )
