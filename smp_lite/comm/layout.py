"""How a tensor travels: as one block of bytes, and so that it arrives with the strides that it was sent with.

Kernels choose by strides, and round differently for others: a convolution of channels-last tensors, a linear
layer of a slice. So the memory that a tensor spans travels as it is where that is no more than its elements
(dense tensors in any order, expanded ones). One with gaps (a slice) travels packed and is spread again, with
gaps shortened: what can be seen of them is that they are there, and how they are aligned.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from ..devices import CPU
from ..record.values.placed import TensorMeta

_ALIGNED = 64
"""Elements, after which alignments repeat."""


class Layout(NamedTuple):
    """How a tensor of some shape lies, and travels.

    Attributes:
        stride: on arrival.
        length: elements of memory that travel.
        packed: shape and strides of the copy that travels; None: the tensor's own memory does.
    """

    stride: tuple[int, ...]
    length: int
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@lru_cache(maxsize=4096)
def travel_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """How a tensor with these strides travels."""
    count = prod(shape)
    contiguous = _dense(shape, range(len(shape)))
    if len(stride) != len(shape):  # not a strided tensor
        return Layout(contiguous, count)
    if not count:
        return Layout(stride, 0)
    extent = 1 + sum([(length - 1) * step for length, step in zip(shape, stride)])
    if extent <= count:
        return Layout(stride, extent)
    spread = list(stride)
    used, needed = 1, 1
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim]))
    for dim in order:
        if shape[dim] == 1 or not stride[dim]:
            continue
        gap = stride[dim] - used
        if gap < 0:  # gaps, and elements in several places
            return Layout(contiguous, count, (shape, contiguous))
        spread[dim] = needed + (gap if gap < _ALIGNED else _ALIGNED + gap % _ALIGNED)
        used, needed = stride[dim] * shape[dim], spread[dim] * shape[dim]
    once = tuple([length if step else 1 for length, step in zip(shape, stride)])
    return Layout(tuple(spread), prod(once), (once, _dense(once, order[::-1])))


def _dense(shape: tuple[int, ...], order: range | list[int]) -> tuple[int, ...]:
    """Strides without gaps; ``order`` gives the dimensions, that with the largest stride first."""
    stride, step = [1] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _parcel(tensor: torch.Tensor, layout: Layout, into: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor, or the copy of it that travels; that lies in ``into``, if given."""
    if layout.packed is None:
        return tensor
    shape, stride = layout.packed
    for dim, length in enumerate(shape):
        tensor = tensor.narrow(dim, 0, length)
    if into is None:
        into = torch.empty(layout.length, dtype=tensor.dtype, device=tensor.device)
    return into.as_strided(shape, stride).copy_(tensor)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; its memory holds its elements."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def outgoing(
    tensor: torch.Tensor, meta: TensorMeta, *, always_told: bool = False
) -> tuple[torch.Tensor, int]:
    """What travels, and how many bytes of its memory.

    Args:
        meta: what the receiver knows of the tensor; strides that it would not guess travel along.
        always_told: they do in any case, so that all messages are of one length.
    """
    tensor = _as_stored(tensor)
    stride = tensor.stride()
    expected = travel_layout(meta.shape, meta.stride)
    layout = expected if stride == meta.stride else travel_layout(meta.shape, stride)
    num_bytes = layout.length * meta.dtype.itemsize
    if layout == expected and not always_told:
        return _parcel(tensor, layout), num_bytes
    message = torch.empty(incoming_bytes(meta), dtype=torch.uint8, device=meta.device)
    row = message[:num_bytes].view(meta.dtype)
    if layout.packed is None:
        row.copy_(tensor.as_strided((layout.length,), (1,)))
    else:
        _parcel(tensor, layout, into=row)
    message[meta.num_bytes :] = torch.tensor(stride, dtype=torch.int64, device=CPU).view(torch.uint8)
    return message, len(message)


def incoming_bytes(meta: TensorMeta) -> int:
    """How long a message may be: all elements, and strides."""
    return meta.num_bytes + 8 * len(meta.shape)


def arrived(message: torch.Tensor, meta: TensorMeta, num_bytes: int) -> torch.Tensor:
    """The tensor that was sent.

    Args:
        message: bytes that were received into; the tensor may keep their memory.
        meta: what is known of it.
        num_bytes: how many have come.
    """
    stride = meta.stride
    if num_bytes > meta.num_bytes:
        stride = tuple(message[meta.num_bytes :].clone().view(torch.int64).tolist())
    return _spread(message, meta.shape, travel_layout(meta.shape, stride), meta.dtype)


def row_of(tensor: torch.Tensor, meta: TensorMeta) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory that travels, as bytes where the tensor is, and the strides that it has on arrival."""
    tensor = _as_stored(tensor)
    layout = travel_layout(meta.shape, tensor.stride())
    parcel = _parcel(tensor, layout)
    row = parcel.as_strided((layout.length,), (1,), parcel.storage_offset())
    return row.view(torch.uint8), tensor.stride()


def arrived_from_host(message: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor of which the host has the bytes, and the strides behind them, on its own device."""
    stride = tuple(message[meta.num_bytes :].clone().view(torch.int64).tolist())
    row = room_for(meta, stride)
    row.copy_(message[: len(row)], non_blocking=True)
    return spread(row, meta, stride)


def room_for(meta: TensorMeta, stride: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised bytes on its device for the memory of a tensor with these strides that travels."""
    num_bytes = travel_layout(meta.shape, stride).length * meta.dtype.itemsize
    return torch.empty(num_bytes, dtype=torch.uint8, device=meta.device)


def spread(row: torch.Tensor, meta: TensorMeta, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides of which ``row`` has the memory; it may keep that."""
    return _spread(row, meta.shape, travel_layout(meta.shape, stride), meta.dtype)


def _spread(row: torch.Tensor, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of which ``row`` has the memory that travelled."""
    found, memory = torch.empty(0, dtype=dtype, device=row.device), row.untyped_storage()
    if layout.packed is None:
        return found.set_(memory, 0, shape, layout.stride)  # type: ignore[call-overload, no-any-return]
    found.set_(memory, 0, *layout.packed)  # type: ignore[call-overload]
    parts = torch.empty_strided(found.shape, layout.stride, dtype=dtype, device=row.device).copy_(found)
    return parts.expand(shape)


def handed_over(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without copying where there is no gap, as it would arrive elsewhere."""
    tensor = _as_stored(tensor)
    layout = travel_layout(tuple(tensor.shape), tensor.stride())
    if layout.packed is None:
        return tensor
    return _spread(_parcel(tensor, layout), tuple(tensor.shape), layout, tensor.dtype)


@lru_cache(maxsize=4096)
def wire_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of what all ranks get: the tensor's own if it is dense, else contiguous ones."""
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
    return _dense(shape, range(len(shape)))


def shaped_like(row: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A row of as many elements with the tensor's shape; with its strides as well, if it is dense.

    What is a parameter's lies as it does: sums over all of it (norms) go along its memory.
    """
    shape = tuple(tensor.shape)
    return row.as_strided(shape, wire_stride(shape, tensor.stride()), row.storage_offset())


def arrival(meta: TensorMeta) -> torch.Tensor:
    """An uninitialised dense tensor to receive into."""
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


def row_of_bytes(data: bytes) -> torch.Tensor:
    """Bytes of the host as a tensor, for a wire."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of_row(row: torch.Tensor) -> bytes:
    """What :func:`row_of_bytes` was given."""
    return row.numpy().tobytes()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's elements taken as integers, to tell whether two hold the same."""
    return int(bits_summed(tensor))


def bits_summed(tensor: torch.Tensor) -> torch.Tensor:
    """The same where the tensor is: the host does not wait for it."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
