"""Copies that end late: a copy into pinned memory is not there until something has waited for it.

Until then the memory holds nonsense, so whoever reads it too early, as on a real device, reads that. The same
holds for all copies between the device and pinned memory in a stream beside the one that computes. Those read
their source when they happen, not when they are queued; if the device's memory has been freed by then, or the
stream had not waited for what the computing one does with it, that is an error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .memory import is_ours, life_of, on_host, place
from .order import COMPUTING, check_order, current


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy of a CPU tensor that a device copies to and from by itself."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin {tensor.type()!r}: only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        copy = tensor.detach().clone()
        storage = copy.untyped_storage()
        storage.pretended_pinned = True  # type: ignore[attr-defined]  # lives as long as the memory
        return copy


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return getattr(tensor.untyped_storage(), "pretended_pinned", False)


def copies_late(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy that need not block takes place; if so, when somebody waits."""
    ours = [tensor for tensor in (target, source) if is_ours(tensor)]
    if len(ours) != 1 or not is_pinned(source if ours[0] is target else target):
        return False
    queue = current(ours[0].device.index or 0)
    if queue.number != COMPUTING:
        check_waited(ours[0])
        queue.push(_Beside([Ref(target), Ref(source)]))
    elif ours[0] is source:
        queue.push(_Copy(on_host(target, {}) if is_ours(target) else target, on_host(source, {}).clone()))
    else:
        return False
    spoil(target)
    return True


def check_waited(tensor: torch.Tensor) -> None:
    """Before the current stream uses the device's memory; see :func:`order.check_order`."""
    check_order(tensor.untyped_storage(), tensor.device.index or 0)


def spoil(target: torch.Tensor) -> None:
    """What something late makes is nonsense until it has ended."""
    host = on_host(target, {}) if is_ours(target) else target
    if host.is_contiguous() and host.dim():
        host.detach().view(torch.uint8).fill_(0xA5)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        target.copy_(source)


class _Copy:
    """In the computing stream, of what was there when it was queued."""

    is_done = False

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target.detach(), source

    def do(self) -> None:
        _copy(self._target, self._source)

    def has_ended(self) -> bool:
        return True


class _Beside:
    """In another stream, of what is there by then; nobody is kept alive but the host's memory."""

    is_done = False

    def __init__(self, ends: list[Ref]) -> None:
        self._ends = ends

    def do(self) -> None:
        target, source = (end.host() for end in self._ends)
        _copy(target, source)

    def has_ended(self) -> bool:
        return True


class Ref:
    """The host's tensor, or where one of the device lies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host: torch.Tensor | None = None if is_ours(tensor) else tensor.detach()
        self._blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._storage = weakref.ref(tensor.untyped_storage())
        self._life = life_of(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()

    def host(self) -> torch.Tensor:
        if self._host is not None:
            return self._host
        storage = self._storage()
        if storage is None or life_of(storage) != self._life:
            raise RuntimeError("memory of the device was freed while a copy from or to it was under way")
        return on_host(place(self._blank, storage, *self._form), {})
