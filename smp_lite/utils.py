"""``smp.utils``: small helpers that scripts import."""

from __future__ import annotations

from typing import Any

from .api import dp_rank, pp_rank, rank, tp_rank
from .nn.layout import layout_of

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(message: Any) -> str:
    """The message with this process's ranks before it, for logs."""
    return f"[rank {rank()}: pp {pp_rank()}, tp {tp_rank()}, dp {dp_rank()}] {message}"


def get_distribution_axis(parameter: Any) -> int | None:
    """The dimension along which a parameter is split over tensor-parallel ranks; None: it is whole.

    ``torch.cat`` of the ranks' parts along it, in the order of ``smp.tp_rank()``, is the whole, and of a
    vocabulary perhaps with rows of zeros at its end.
    """
    layout = layout_of(parameter)
    if layout is None:
        return None
    for dim, axes in enumerate(layout.dims):
        if any(axis.size > 1 for axis in axes):
            return dim
    return None
