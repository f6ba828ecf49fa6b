"""Transformations of ``torch.func`` do not go through collectives, and so not through split layers."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..errors import SMPError

__all__ = ["refuse_transforms"]


def refuse_transforms(*tensors: torch.Tensor) -> None:
    """To be called before ranks exchange anything for these tensors.

    Raises:
        SMPError: a transformation is under way, or one of the tensors is a dual one of forward-mode AD.
    """
    if torch._C._are_functorch_transforms_active():
        what = "torch.func (grad, vjp, jvp, vmap, ...)"
    elif forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        what = "forward-mode AD (torch.autograd.forward_ad)"
    else:
        return
    raise SMPError(
        f"{what} goes through a layer that is split over ranks, whose exchanges it cannot transform. Use "
        "torch.autograd.grad(..., create_graph=True), which goes through split layers, and whole batches in "
        "the place of vmap; or leave the layer whole: smp.set_tensor_parallelism(layer, False), or a plan "
        "without it"
    )
