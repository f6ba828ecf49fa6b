"""How kernels lay out their results in memory, where they say something else of fake tensors.

Later kernels choose their algorithm by strides, which changes the last bits of what they compute; so what is
recorded must have the strides that one process gets. Fake tensors are right nearly everywhere. What they get
wrong in torch 2.13 on the CPU, found by comparing both over many operators and layouts
(``tests/transparency/values/test_layouts.py``), is put right here.
"""

from __future__ import annotations

from typing import Any

import torch

from ...devices import CPU

__all__ = ["as_kernels_lay_out"]

_LIKE_POINTWISE = {
    torch.ops.aten._log_softmax.default,
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.leaky_relu.default,  # says itself that it is pointwise, but not in torch 2.8
    torch.ops.aten.tril.default,
    torch.ops.aten.triu.default,
}
_KEEPS_LAYOUT = {
    torch.ops.aten.clone.default,
    torch.ops.aten.hardtanh.default,
    torch.ops.aten.rsub.Scalar,
}
_ALWAYS_CONTIGUOUS = {torch.ops.aten.log_sigmoid_forward.default, torch.ops.aten.im2col.default}
_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_impl_index.default,
}


def as_kernels_lay_out(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The fake result of an operator with the strides that its kernel gives it."""
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, torch.Tensor) or not first.dim() or not args:
        return result
    given = args[0]
    if not isinstance(given, torch.Tensor):
        return result
    if func is torch.ops.aten.roll.default:
        images = given.dim() == 4 and _is_channels_last(given)
        strides = _as_images(given).stride() if images else _contiguous(first.shape)
    elif func is torch.ops.aten.native_group_norm.default and given.device.type == CPU.type:
        # Right in torch 2.13; in 2.14 fake tensors say contiguous of all.
        strides = _as_images(given).stride() if _is_channels_last(given) else _contiguous(first.shape)
    elif _is_laid_out_anew(func, args, given, first):
        strides = _contiguous(first.shape)
    else:
        return result
    if strides == first.stride():
        return result
    fresh = first.new_empty_strided(first.shape, strides)
    return type(result)((fresh, *result[1:])) if first is not result else fresh


def _is_laid_out_anew(func: Any, args: tuple[Any, ...], given: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether the kernel's result is contiguous, with the strides of a tensor that is made so."""
    if func in _BATCH_NORMS:
        keeps = given.dim() in (4, 5) and given.is_contiguous(
            memory_format=torch.channels_last if given.dim() == 4 else torch.channels_last_3d
        )
        return given.is_contiguous() or not keeps
    if func in _ALWAYS_CONTIGUOUS:
        return True
    if 1 not in first.shape or func in _KEEPS_LAYOUT or func._schema.is_mutable:
        return False  # strides are ambiguous only where a length is one
    if func not in _LIKE_POINTWISE and torch.Tag.pointwise not in func.tags:
        return False
    operands = [
        arg
        for arg, argument in zip(args, func._schema.arguments)
        if isinstance(argument.type, torch.TensorType) and arg is not None
    ]
    if func in _LIKE_POINTWISE:
        return given.is_contiguous()
    return all(
        isinstance(arg, torch.Tensor) and arg.shape == first.shape and arg.is_contiguous() for arg in operands
    )


def _as_images(image: torch.Tensor) -> torch.Tensor:
    """A tensor of its shape, channels last."""
    last = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
    return torch.empty_like(image, memory_format=last)


def _is_channels_last(image: torch.Tensor) -> bool:
    """As c10 tells it by strides alone, whatever the lengths."""
    shape, strides = image.shape, image.stride()
    if len(shape) not in (4, 5):
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(shape[axis], 1)
    return True


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides))
