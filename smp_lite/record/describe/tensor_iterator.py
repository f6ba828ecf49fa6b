"""Strides as ATen's kernels choose them, where lengths of one leave several that mean the same memory.

A tensor of one sample, or of one channel, can say many strides of that axis. Nothing is read by them, but
what follows chooses its layout by them: a convolution asks whether they look like channels last, and a
reshape counts them. Fake tensors go through Python there, which says other strides than the kernels do. What
is here follows torch 2.13: ``aten/src/ATen/TensorIterator.cpp`` and ``c10/core/MemoryFormat.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "contiguous",
    "is_ambiguous",
    "is_channels_last",
    "last_channels",
    "looks_like_channels_last",
    "of_elementwise",
    "of_view",
    "preserved",
]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides))


def last_channels(shape: Sequence[int]) -> tuple[int, ...]:
    """Of an image or a volume, batch and channels first in its shape."""
    order = (1, *range(len(shape) - 1, 1, -1), 0)
    return _in_order(shape, order)


def looks_like_channels_last(tensor: torch.Tensor) -> bool:
    """As c10 tells it by strides alone, whatever the lengths (``suggest_memory_format``)."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(shape[axis], 1)
    return True


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Of an image or a volume whose memory is so; a length of one may say any stride."""
    if tensor.dim() not in (4, 5):
        return False
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=last)


def is_ambiguous(tensor: torch.Tensor) -> bool:
    """Whether what is added to it in place leaves it other strides than a sum of both would have."""
    shape = tensor.shape
    if 1 not in shape or tensor.layout is not torch.strided:
        return False
    return tensor.stride() != contiguous(shape) and _is_dense(shape, tensor.stride())


def of_view(given: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Of ``given.view(shape)``, or None (``computeStride`` in ``aten/src/ATen/TensorUtils.cpp``)."""
    old, strides = given.shape, given.stride()
    if not given.numel() or not old:
        return None
    found = [0] * len(shape)
    axis = len(shape) - 1
    base, length, covered = strides[-1], 1, 1
    for old_axis in reversed(range(len(old))):
        length *= old[old_axis]
        goes_on = old_axis > 0 and (old[old_axis - 1] == 1 or strides[old_axis - 1] == length * base)
        if goes_on:
            continue
        while axis >= 0 and (covered < length or shape[axis] == 1):
            found[axis] = covered * base
            covered *= shape[axis]
            axis -= 1
        if covered != length:
            return None
        if old_axis:
            base, length, covered = strides[old_axis - 1], 1, 1
    return tuple(found) if axis < 0 else None


def preserved(given: torch.Tensor) -> tuple[int, ...] | None:
    """Of ``empty_like``: those of what it is like, if that has no gaps and nothing twice; else None."""
    return given.stride() if _is_dense(given.shape, given.stride()) else None


def of_elementwise(
    operands: Sequence[torch.Tensor], shape: Sequence[int], *, with_number: bool = False
) -> tuple[int, ...]:
    """Of the result of a function of every element, of that shape, by itself.

    Args:
        operands: what it reads, in the order of its arguments.
        with_number: also a Python number that the kernel makes a tensor of.
    """
    if not with_number and all(operand.shape == shape for operand in operands):
        if all(operand.is_contiguous() for operand in operands):
            return contiguous(shape)
        if len(shape) == 4 and all(is_channels_last(operand) for operand in operands):
            return last_channels(shape)
        strides = operands[0].stride()
        if all(each.stride() == strides for each in operands) and _is_dense(shape, strides):
            return strides
    spread = [_spread(operand, shape) for operand in operands]
    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        later = i
        for earlier in reversed(range(i)):
            comes = _comes_after(spread, shape, order[earlier], order[later])
            if comes > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif comes < 0:
                break
    return _in_order(shape, order)


def _comes_after(strides: Sequence[Sequence[int]], shape: Sequence[int], one: int, other: int) -> int:
    for each in strides:
        if each[one] == 0 or each[other] == 0:
            continue
        if each[one] != each[other]:
            return 1 if each[one] > each[other] else -1
        if shape[one] > shape[other]:
            return 1
    return 0


def _spread(operand: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides over the shape of the result, 0 where the operand is repeated."""
    missing = len(shape) - operand.dim()
    own = [
        0 if length == 1 and wanted != 1 else stride
        for length, stride, wanted in zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    ]
    return [0] * missing + own


def _in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, the first axis of the order innermost."""
    strides = [0] * len(shape)
    step = 1
    for axis in order:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """No gaps, and nothing twice; lengths of one do not count."""
    expected = 1
    for length, stride in sorted(zip(shape, strides, strict=True), key=lambda axis: axis[1]):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True
