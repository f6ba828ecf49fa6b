"""Attention of a sequence over ranks that exchange tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch

from ...comm.groups.axis import Axis
from ..grid.attention import attend, check_mask
from ..grid.checks import check_divides
from ..transforms import refuse_transforms
from .mesh import SequenceMesh

__all__ = ["all_to_all_attention"]


def all_to_all_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: SequenceMesh,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`~smp_lite.nn.sequence.ring_attention`, with all tokens of some heads on each rank for the
    time of the attention; the numbers of heads, of keys too, are multiples of the number of ranks.

    Each rank receives ``(P - 1) / P`` of its parts of queries, keys, values and result. A mask of this rank's
    queries is gathered from all ranks.

    Raises:
        ValueError: heads that do not divide, or shapes that do not fit.
    """
    for what, x in (("heads of queries,", q), ("heads of keys,", k)):
        try:
            check_divides(f"all-to-all attention: {what}", x.shape[1], (mesh.axis,))
        except ValueError as error:
            raise ValueError(f"{error}; ring attention takes any number") from None
    if mask is not None:
        check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2] * mesh.size))
        mask = _whole_mask(mask, mesh)
    found = attend(*(_to_heads(x, mesh) for x in (q, k, v)), mask, causal)
    return _exchange(mesh.in_rank_order(found, 2), mesh.axis, 2, 1)


def _to_heads(x: torch.Tensor, mesh: SequenceMesh) -> torch.Tensor:
    return mesh.in_sequence(_exchange(x, mesh.axis, 1, 2), 2)


def _whole_mask(mask: torch.Tensor, mesh: SequenceMesh) -> torch.Tensor:
    """Of all queries, and this rank's heads."""
    if mask.shape[-2] > 1:
        mask = mesh.in_sequence(mesh.axis.all_gather(mask, mask.dim() - 2), mask.dim() - 2)
    if mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mesh.axis.part(mask, mask.dim() - 3)
    return mask


def _exchange(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    if axis.size == 1:
        return x
    refuse_transforms(x)
    found: torch.Tensor = _AllToAll.apply(x, axis, split_dim, join_dim)
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, join_dim)
        return axis.all_to_all(x, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        split_dim, join_dim = ctx.dims
        return _AllToAll.apply(grad, ctx.axis, join_dim, split_dim), None, None, None
