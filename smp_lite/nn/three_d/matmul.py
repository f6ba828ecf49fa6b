"""Matrix products on a d x d x d mesh (Bian et al. 2021, arXiv 2105.14450, algorithms 1 and 2).

With rows over axes (i, r) and features over axis c, ``Y = X W`` gathers X over r and W over i, multiplies,
and sums over c to rows over (i, c). So Y has its features over r. Each rank receives
``(d - 1) / d^3 (|X| + |W| + |Y|)`` elements in forward, and as many in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..autocast import cast_for_autocast, without_autocast
from ..transforms import refuse_transforms
from .layout import Layout3D
from .mesh import Mesh3D

__all__ = ["product"]


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    mesh: Mesh3D,
    layout: Layout3D,
    *,
    weight_dim: int,
    regather: bool = False,
) -> torch.Tensor:
    """
    Args:
        x: ``(batch / d^2, ..., K / d)``, of ``layout``.
        weight: ``(N / d, K / d)`` split once more, along ``weight_dim``, over ``mesh.weight``.
        regather: backward gathers X and W again, instead of keeping them.

    Returns:
        ``(batch / d^2, ..., N / d)``, of the other layout.
    """
    refuse_transforms(x, weight)
    x, weight = cast_for_autocast(x, weight)
    with without_autocast(x):
        result: torch.Tensor = _Product.apply(x, weight, mesh, layout, weight_dim, regather)
    return result


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        mesh: Mesh3D,
        layout: Layout3D,
        weight_dim: int,
        regather: bool,
    ) -> torch.Tensor:
        ctx.over_x, ctx.over_y = mesh.rows(layout)[1], mesh.features(layout)
        ctx.over_weight, ctx.weight_dim, ctx.regather = mesh.weight, weight_dim, regather
        all_x = ctx.over_x.all_gather(x, 0)
        all_weight = ctx.over_weight.all_gather(weight, weight_dim)
        ctx.save_for_backward(*((x, weight) if regather else (all_x, all_weight)))
        return ctx.over_y.reduce_scatter(F.linear(all_x, all_weight), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        all_grad = ctx.over_y.all_gather(grad, 0)
        of_x = of_weight = None
        if needs_x:
            if ctx.regather:
                weight = ctx.over_weight.all_gather(weight, ctx.weight_dim)
            of_x = ctx.over_x.reduce_scatter(all_grad @ weight, 0)
        if needs_weight:
            if ctx.regather:
                x = ctx.over_x.all_gather(x, 0)
            whole = all_grad.flatten(0, -2).t() @ x.flatten(0, -2)
            of_weight = ctx.over_weight.reduce_scatter(whole, ctx.weight_dim)
        return of_x, of_weight, *(None,) * 4
