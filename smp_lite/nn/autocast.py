"""What torch's autocast does with the inputs of functions that split layers compute themselves.

Which functions run in 32 bits differs between devices: on CUDA norms do, on processors they keep the dtype of
their input, and a loss of 16-bit logits is 32-bit on both. So torch is asked, with a tensor of no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["cast_for_autocast", "cast_for_loss", "cast_for_norm", "without_autocast"]


def cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What torch's autocast does with the inputs of a matrix product, differentiably; else nothing."""
    if not _autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """For what has cast its inputs itself."""
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def cast_for_norm(
    x: torch.Tensor, norm: Callable[[torch.Tensor, list[int]], torch.Tensor] = F.layer_norm
) -> torch.Tensor:
    """The input of a norm (``F.layer_norm``, ``F.rms_norm``), whose result has its dtype; differentiably."""
    return x.to(norm(x.detach().new_empty(0, 1), [1]).dtype) if _autocasts(x) else x


def cast_for_loss(logits: torch.Tensor) -> torch.Tensor:
    """The logits of a cross entropy, whose result has their dtype; differentiably."""
    if not _autocasts(logits):
        return logits
    target = torch.zeros(1, dtype=torch.long, device=logits.device)
    return logits.to(F.cross_entropy(logits.detach().new_zeros(1, 1), target).dtype)


def _autocasts(x: torch.Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
