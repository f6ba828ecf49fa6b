"""How kernels lay out their results in memory, where they say something else of fake tensors.

Later kernels choose their algorithm by strides, which changes the last bits of what they compute; so what is
recorded must have the strides that one process gets. Fake tensors are right nearly everywhere. What they get
wrong in torch 2.13 on the CPU, found by comparing both over many operators and layouts
(``tests/transparency/values/test_layouts.py``), is put right here, most of it for batches of one sample.
"""

from __future__ import annotations

from typing import Any

import torch

from ...devices import CPU
from . import tensor_iterator

__all__ = ["as_kernels_lay_out"]

_aten = torch.ops.aten

_VIEWS = {_aten.view.default, _aten._unsafe_view.default}
_LIKE_POINTWISE = {
    _aten._log_softmax.default,
    _aten.native_layer_norm.default,
    _aten.native_dropout.default,
    _aten.hardswish.default,
    _aten.leaky_relu.default,  # says itself that it is pointwise, but not in torch 2.8
    _aten.masked_fill.Scalar,
    _aten.masked_fill.Tensor,
    _aten.tril.default,
    _aten.triu.default,
}
_MADE_LIKE = {
    _aten.empty_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.clone.default,
    _aten.hardtanh.default,
    _aten._prelu_kernel.default,
    _aten.nan_to_num.default,
    _aten.flip.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten.sort.default,
    _aten.sort.stable,
}
_ALWAYS_CONTIGUOUS = {
    _aten.log_sigmoid_forward.default,
    _aten.im2col.default,
    _aten.pow.Scalar,
    _aten.rrelu_with_noise.default,
}
_AS_IMAGES = {
    _aten.native_group_norm.default,
    _aten.channel_shuffle.default,
    _aten.native_channel_shuffle.default,
}
_BATCH_NORMS = {
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._batch_norm_with_update.default,
    _aten._batch_norm_impl_index.default,
}


def as_kernels_lay_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The fake result of an operator with the strides that its kernel gives it."""
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, torch.Tensor) or not first.dim() or not args:
        return result
    given = next((arg for arg in args[:2] if isinstance(arg, torch.Tensor)), None)
    if given is None or first.layout is not torch.strided:
        return result
    strides = _strides(func, args, kwargs, given, first)
    if strides is None or strides == first.stride():
        return result
    if func in _VIEWS:
        return _aten.as_strided.default(given, first.shape, strides, given.storage_offset())
    fresh = first.new_empty_strided(first.shape, strides)
    return type(result)((fresh, *result[1:])) if first is not result else fresh


def _strides(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: torch.Tensor, first: torch.Tensor
) -> tuple[int, ...] | None:
    """None: as the fake tensor says."""
    shape = first.shape
    if func in _VIEWS:
        is_clear = 1 not in shape and 1 not in given.shape and 0 not in given.stride()
        return None if is_clear else tensor_iterator.of_view(given, shape)
    if func in _ALWAYS_CONTIGUOUS:
        return tensor_iterator.contiguous(shape)
    if func is _aten.roll.default:
        images = tensor_iterator.looks_like_channels_last(given) and _moves_all(given, *args[1:])
        return tensor_iterator.last_channels(shape) if images else tensor_iterator.contiguous(shape)
    if func in _BATCH_NORMS or func in _AS_IMAGES:
        if func is _aten.native_group_norm.default and given.device.type != CPU.type:
            return None
        images = tensor_iterator.looks_like_channels_last(given)
        if func in _BATCH_NORMS:
            images = not given.is_contiguous() and (images or tensor_iterator.is_channels_last(given))
        return tensor_iterator.last_channels(shape) if images else tensor_iterator.contiguous(shape)
    if 1 not in shape or func._schema.is_mutable:
        return None  # strides are ambiguous only where a length is one
    if func in _MADE_LIKE:
        keeps = kwargs.get("memory_format") in (None, torch.preserve_format)
        return tensor_iterator.preserved(given) if keeps else None
    if func in _LIKE_POINTWISE:
        return tensor_iterator.contiguous(shape) if given.is_contiguous() else None
    if func is _aten.glu.default:
        axis = args[1] if len(args) > 1 else -1
        return tensor_iterator.of_elementwise([_aten.slice.Tensor(given, axis, 0, shape[axis])], shape)
    if torch.Tag.pointwise not in func.tags:
        return None
    has_number = any(
        isinstance(argument.type, torch.TensorType) and isinstance(arg, int | float | complex)
        for arg, argument in zip(args, func._schema.arguments)
    )
    return tensor_iterator.of_elementwise(
        [arg for arg in args if isinstance(arg, torch.Tensor)],
        shape,
        with_number=has_number or (func._overloadname == "Scalar" and func is not _aten.lerp.Scalar),
    )


def _moves_all(given: torch.Tensor, shifts: Any, dims: Any = ()) -> bool:
    """Whether no axis is rolled by its length: the kernel joins two parts, and an empty one has no layout."""
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and all(shift % given.shape[axis] for shift, axis in zip(shifts, dims))
