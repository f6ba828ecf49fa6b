"""``smp.utils``: small helpers that scripts import."""

from __future__ import annotations

from typing import Any

from .api import dp_rank, pp_rank, rank, tp_rank

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(message: Any) -> str:
    """The message with this process's ranks before it, for logs."""
    return f"[rank {rank()}: pp {pp_rank()}, tp {tp_rank()}, dp {dp_rank()}] {message}"


def get_distribution_axis(parameter: Any) -> int | None:
    """The axis along which a parameter is cut over tensor-parallel ranks: None, since none is."""
    return None
