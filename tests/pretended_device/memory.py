"""Tensors of the device, and the CPU tensors over the same memory.

A tensor of any device can be made of memory at hand by DLPack, whose capsule says on which device it is. So
the memory is a CPU tensor's, which lives until the last tensor of the device that has it is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from .order import touch

NAME = "pretended"

_EXTENSION_DEVICE = 12  # kDLExtDev, which torch takes for PrivateUse1
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

Storages = dict[int, torch.UntypedStorage]
"""Of the device, by the address of the CPU's storage object over the same memory."""


def is_ours(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of the device."""
    return tensor.device.type == NAME


def _moved(host: torch.Tensor, index: int) -> torch.Tensor:
    """The same dense memory as a tensor of the device."""
    capsule = torch._C._to_dlpack(host)
    device = _Tensor.from_address(_pointer(capsule, b"dltensor")).device
    device.type, device.index = _EXTENSION_DEVICE, index
    return torch._C._from_dlpack(capsule)


def place(tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """Lets the tensor look at that memory."""
    return _set_storage.redispatch(_CPU, tensor, storage, offset, size, stride)


def on_host(tensor: torch.Tensor, known: Storages) -> torch.Tensor:
    """A CPU tensor over the memory of one of the device."""
    storage = tensor.untyped_storage()
    if getattr(storage, "pretended_emptied", False):
        raise RuntimeError(f"a tensor on {tensor.device} has no memory: its storage was resized to 0")
    if not storage.nbytes():  # what it is resized to is new memory
        return torch.empty(0, dtype=tensor.dtype, device="cpu").as_strided(tensor.shape, tensor.stride())
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    known[memory._cdata] = storage
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    host.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        host = host.conj()
    return host._neg_view() if tensor.is_neg() else host


def on_device(host: torch.Tensor, index: int, known: Storages) -> torch.Tensor:
    """A tensor of the device over the memory of a CPU tensor: of one that is known, or anew."""
    storage = host.untyped_storage()
    ours = known.get(storage._cdata)
    if ours is None:
        row = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
        ours = known[storage._cdata] = _moved(row, index).untyped_storage()
        count(index, ours)
        touch(ours, index)
    blank = _moved(torch.empty(0, dtype=host.dtype, device="cpu"), index)
    found = place(blank, ours, host.storage_offset(), host.shape, host.stride())
    if host.is_conj():
        found = torch._conj(found)
    return torch._neg_view(found) if host.is_neg() else found


class Use:
    """Bytes of one device's tensors."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


USE: dict[int, Use] = {}
"""By number of the device."""


class _Held:
    """Bytes of one storage."""

    def __init__(self, use: Use, num_bytes: int) -> None:
        self._use, self._now = use, 0
        self.be(num_bytes)

    def be(self, num_bytes: int) -> None:
        self._use.add(num_bytes - self._now)
        self._now = num_bytes


def count(index: int, storage: torch.UntypedStorage) -> None:
    """Counts new memory until it is freed."""
    held = _Held(USE.setdefault(index, Use()), storage.nbytes())
    storage.pretended_held = held  # type: ignore[attr-defined]  # lives as long as the memory
    weakref.finalize(storage, held.be, 0)


def life_of(storage: torch.UntypedStorage) -> int:
    """How often its memory has been given back or taken again: with another number, another memory."""
    found: int = getattr(storage, "pretended_life", 0)
    return found


_resize = torch.UntypedStorage.resize_


def resize_storage(self: torch.UntypedStorage, size: int) -> Any:
    """A storage's own ``resize_``, which torch leaves to backends in C++; up to what the storage had once.

    Memory that is given back or taken again is counted, and is nonsense then. Really it stays, since torch
    lets nobody in Python change what a storage has.
    """
    if self.device.type != NAME:
        return _resize(self, size)
    if size > self.nbytes():
        raise NotImplementedError("a storage of the pretended device cannot become larger than it was")
    ours: Any = self
    index = self.device.index or 0
    ours.pretended_emptied = False
    row = _moved(torch.empty(0, dtype=torch.uint8, device="cpu"), index)
    on_host(place(row, self, 0, (self.nbytes(),), (1,)), {}).fill_(0xA5)
    ours.pretended_emptied = not size
    ours.pretended_life = life_of(self) + 1
    ours.pretended_held.be(size)
    touch(self, index)
    return self


def take_form(tensor: torch.Tensor, host: torch.Tensor, known: Storages) -> None:
    """What an operation in place has done to the CPU tensor's shape and memory."""
    storage = host.untyped_storage()
    form = (host.shape, host.stride(), host.storage_offset())
    if storage._cdata in known and form == (tensor.shape, tensor.stride(), tensor.storage_offset()):
        return
    ours = on_device(host, tensor.device.index, known)
    place(tensor, ours.untyped_storage(), host.storage_offset(), host.shape, host.stride())
