"""Errors of layers split over several ranks: sizes that do not divide, and tensors that are no part, or the
part of something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...comm.groups.axis import Axis
from ...devices import is_host
from ..one_d.parts import nearest_sizes

__all__ = [
    "check_divides",
    "check_features",
    "check_ids",
    "check_square",
    "compute_dtype",
    "refuse_options",
]


def check_divides(what: str, size: int, axes: Sequence[Axis], factor: int = 1) -> None:
    """Raises ValueError, naming the nearest sizes, where ranks cannot share a size equally.

    Args:
        what: the name of the size, as the user wrote it.
        size: to be shared.
        axes: over whose ranks.
        factor: further parts on each rank.
    """
    parts = math.prod(axis.size for axis in axes) * factor
    if size % parts == 0:
        return
    over = " x ".join(f"{axis.name} {axis.size}" for axis in axes) + (f" x {factor}" if factor > 1 else "")
    raise ValueError(
        f"{what} {size} does not divide into {parts} parts ({over}); the nearest: "
        f"{nearest_sizes(size, parts)}"
    )


def check_square(names: str, sizes: Sequence[int]) -> None:
    """Raises ValueError unless the axes have one size."""
    if len(set(sizes)) != 1:
        raise ValueError(f"the axes {names} must have one size, got {', '.join(map(str, sizes))}")


def check_features(layer: str, x: torch.Tensor, part: int, whole: int) -> None:
    """Raises ValueError where the last dimension is not that of this rank's part."""
    got = x.shape[-1] if x.dim() else 0
    if got == part:
        return
    if got == whole:
        reason = "this is the whole tensor; take this rank's part with the mesh's split_input"
    elif got and got < part and part % got == 0:
        reason = "this is a part of a tensor split over more ranks, or of a smaller one"
    elif got > part and got % part == 0 and whole % got == 0:
        reason = "this is a part of a tensor split over fewer ranks"
    else:
        reason = "this is a tensor of another layer, or a part of one"
    raise ValueError(
        f"{layer} takes parts of [..., {part}], of a whole of [..., {whole}], "
        f"and got {list(x.shape)}: {reason}"
    )


def check_ids(what: str, ids: torch.Tensor, size: int, allowed: int | None = None) -> None:
    """Raises IndexError where an index is out of range: no rank would find it, and all would add zeros.

    Args:
        what: they are.
        ids: whole numbers; of fake ones nothing is known.
        size: they must lie below.
        allowed: one more value that they may have.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{what} must be whole numbers, got {ids.dtype}")
    if isinstance(ids, FakeTensor) or ids.device.type == "meta" or not ids.numel():
        return
    wrong = (ids < 0) | (ids >= size)
    if allowed is not None:
        wrong &= ids != allowed
    if not is_host(ids.device):
        torch._assert_async(~wrong.any())  # does not wait; the error is the device's own
    elif bool(wrong.any()):
        raise IndexError(f"{what} must be in 0 ... {size - 1}, got {int(ids[wrong][0])}")


def refuse_options(module: Any, **expected: Any) -> None:
    """Raises ValueError where a module has an option that a split one has not."""
    for name, value in expected.items():
        if getattr(module, name) != value:
            raise ValueError(
                f"{type(module).__name__} with {name}={getattr(module, name)!r} cannot be split over "
                f"ranks; leave it whole, or set {name}={value!r}"
            )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in: 32 bits at least."""
    return dtype if torch.finfo(dtype).bits >= 32 else torch.float32
