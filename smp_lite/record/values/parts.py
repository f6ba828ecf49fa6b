"""A rank's part of an ordinary tensor that all ranks hold.

The ranks of one model must read the same tensors in a step, which is compared by what is in them. Ranks that
share a layer take their own parts of the batch, which differ; such a part is told by the whole and by how it
is cut, which all ranks have in common.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from .memory import digest_of

__all__ = ["contents_of", "mark_part"]


@dataclass(frozen=True, slots=True)
class _Part:
    whole: torch.Tensor
    how: str
    cut: Callable[[torch.Tensor], torch.Tensor]


# Not as an attribute: a tensor with attributes of its own keeps modules from being one recorded call.
_parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mark_part(
    part: torch.Tensor, whole: torch.Tensor, how: str, cut: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Notes that a tensor is this rank's part of another; it then keeps that one's memory.

    Tensors with a gradient, which are activations and no data, are left alone, and so are fake and placed
    ones.

    Args:
        part: of the whole; it is returned.
        whole: the same on all ranks that share the layer.
        how: in words that are the same on all of them.
        cut: makes the part again, without talking to anybody.
    """
    if type(part) is torch.Tensor and type(whole) is torch.Tensor and part is not whole:
        with torch._C.DisableTorchFunction():
            is_data = not whole.requires_grad
        if is_data:
            _parts[part] = _Part(whole, how, cut)
    return part


def contents_of(tensor: torch.Tensor) -> int:
    """The digest of an ordinary tensor; of a part of another one that of the whole and of the way it is cut.

    A part that has been changed since, or whose whole has, counts by itself.
    """
    found: _Part | None = _parts.get(tensor)
    if found is None:
        return digest_of(tensor)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        again = found.cut(found.whole.detach())
    mine = digest_of(tensor)
    if again.shape != tensor.shape or digest_of(again) != mine:
        return mine
    return zlib.crc32(f"{contents_of(found.whole)} {found.how}".encode())
