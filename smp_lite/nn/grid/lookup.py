"""Looking rows up in a part of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .checks import refuse_options

__all__ = ["check_embedding", "masked_lookup"]


def check_embedding(dense: nn.Embedding) -> None:
    """Raises ValueError for options that look at whole rows, or at all of them together."""
    refuse_options(dense, max_norm=None, scale_grad_by_freq=False, sparse=False)


def masked_lookup(ids: torch.Tensor, rows: torch.Tensor, first: int, padding_idx: int | None) -> torch.Tensor:
    """Rows of a table of which those from ``first`` on are here; zeros for the others."""
    local = ids - first
    elsewhere = (local < 0) | (local >= rows.shape[0])
    padding = -1 if padding_idx is None else padding_idx - first
    found = F.embedding(
        local.masked_fill(elsewhere, 0), rows, padding if 0 <= padding < rows.shape[0] else None
    )
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)
