"""Dropout inside a distributed block.

The ranks of a stage draw from generators in the same state, so what they hold alike is dropped alike. Parts
that differ need masks that differ: their generator's seed is drawn from the common one, which so goes on
alike on all of them, and mixed with the rank. Where ranks have batches of their own, scripts may seed each by
its own number; then what all hold alike is dropped by the first one's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from ...comm.groups.axis import Axis

__all__ = ["dropout_alike", "dropout_of_part"]

_MIX = 0x9E3779B97F4A7C15
"""Odd, so that ranks get different seeds whatever the number drawn."""


def dropout_of_part(x: torch.Tensor, p: float, training: bool, axis: Axis) -> torch.Tensor:
    """Dropout of this rank's part of a tensor, independent of the other ranks'.

    Args:
        p: probability of a zero; others are divided by 1 - p.
        axis: of one rank: it is torch's dropout.
    """
    if not training or p == 0.0:
        return x
    if axis.size == 1 or isinstance(x, FakeTensor) or p == 1.0:
        return F.dropout(x, p)
    return _dropped(x, p, int(torch.randint(2**62, ())) + (axis.index + 1) * _MIX)


def dropout_alike(x: torch.Tensor, p: float, training: bool, axis: Axis) -> torch.Tensor:
    """Dropout of what all ranks hold alike, whatever states their generators are in; collective over them."""
    if not training or p == 0.0:
        return x
    if axis.size == 1 or isinstance(x, FakeTensor) or p == 1.0:
        return F.dropout(x, p)
    return _dropped(x, p, int(axis.broadcast(torch.randint(2**62, (1,)), 0)))


def _dropped(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    generator = torch.Generator(x.device)
    generator.manual_seed(seed % 2**63)
    kept = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return x * kept / (1.0 - p)
