"""How a tensor travels: as one block of bytes that keeps its memory layout where it can.

A dense tensor (transposed ones included) arrives with the strides that it left with, because kernels may
round differently for another layout. A tensor with gaps or overlaps (a slice, an expanded one) travels
contiguous.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..record.values.placed import TensorMeta


@lru_cache(maxsize=4096)
def wire_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides on arrival: the tensor's own if it is dense, else contiguous ones."""
    expected = 1
    for length, step in sorted(zip(shape, stride, strict=False), key=lambda pair: (pair[1], pair[0])):
        if length == 1:
            continue
        if step != expected:
            break
        expected *= length
    else:
        if len(stride) == len(shape):
            return stride
    contiguous, step = [], 1
    for length in reversed(shape):
        contiguous.append(step)
        step *= max(length, 1)
    return tuple(reversed(contiguous))


def arrival(meta: TensorMeta) -> torch.Tensor:
    """An uninitialised tensor to receive into."""
    stride = wire_stride(meta.shape, meta.stride)
    return torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device=meta.device)


def departure(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor, or a copy of it, laid out as :func:`arrival` lays out ``meta``."""
    tensor = tensor.detach()
    stride = wire_stride(meta.shape, meta.stride)
    if tuple(tensor.stride()) == stride and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_strided(meta.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as one row of bytes: what carries it need not know dtypes and layouts."""
    row = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return row.view(torch.uint8)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's elements taken as integers, to tell whether two hold the same."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
