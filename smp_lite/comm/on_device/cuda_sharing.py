"""CUDA's interprocess memory and events, for :mod:`..wires.mapped` and :mod:`.mapped`.

Memory goes by the driver's own functions (CUDA Driver API, "Memory Management": ``cuIpcGetMemHandle``,
``cuIpcOpenMemHandle``), since torch's (``UntypedStorage._share_cuda_``) change the storage that is sent, and
count its readers in files, for each tensor anew. What is opened, once, is the whole allocation that a tensor
lies in; torch's allocator gives few and large ones. A handle tells an allocation from a later one at the same
address, so what was opened is never mistaken. It stays open until :data:`_MOST_OPEN` others are. An
allocation that its process has given back to the driver meanwhile (``torch.cuda.empty_cache()``, or for lack
of memory) is read no more, since only memory that is in use is named; but as long as it is open here, the
driver may not have it free.

Events go by torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections import OrderedDict
from typing import Any

import torch

from ...devices import current_stream, home, module
from ...errors import SMPError

__all__ = ["TYPE", "CudaSharing", "cannot_share"]

TYPE = "cuda"

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_MOST_OPEN = 64
"""Allocations of other processes that are mapped at the same time."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PLACE = struct.Struct("=QQ")  # offset and length in bytes


def cannot_share(device: torch.device, local_size: int) -> str:
    """Why this host's ranks cannot read each other's memory; "": they can."""
    instead = "leave SMP_LITE_WIRE out, or set it to nccl or mpi"
    try:
        _driver()
    except OSError:
        return f"CUDA's driver, libcuda.so.1, is not to be found: {instead}"
    settings = " ".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    if "expandable_segments:true" in settings.lower():
        return (
            f"memory of expandable segments ({' or '.join(_ALLOCATOR_VARIABLES)}) cannot be shared: {instead}"
        )
    torch_cuda = module(device)
    if (allocator := torch_cuda.get_allocator_backend()) != "native":
        return f"memory of torch's allocator {allocator!r} cannot be shared: {instead}"
    for other in range(min(local_size, torch_cuda.device_count())):
        if other != device.index and not torch_cuda.can_device_access_peer(device.index, other):
            return f"device {device.index} does not reach the memory of device {other}: {instead}"
    return ""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class CudaSharing:
    """See :class:`~.sharing.Sharing`."""

    name_bytes = _HANDLE_BYTES + _PLACE.size
    handle_bytes = _HANDLE_BYTES

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, int] = OrderedDict()  # handle -> address here
        self._events: dict[bytes, Any] = {}
        torch.empty(1, device=home())  # the driver's functions need the context that torch makes

    def name(self, row: torch.Tensor) -> bytes:
        address, base, size = row.data_ptr(), ctypes.c_uint64(), ctypes.c_size_t()
        if not row.numel():
            return bytes(self.name_bytes)
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        handle = _Handle()
        _call(
            "cuIpcGetMemHandle",
            ctypes.byref(handle),
            base,
            hint="memory of torch's expandable segments cannot be shared: take expandable_segments out of "
            "PYTORCH_ALLOC_CONF, or set SMP_LITE_WIRE=mpi",
        )
        return bytes(handle) + _PLACE.pack(address - base.value, row.numel())

    def copy(self, name: bytes, row: torch.Tensor) -> None:
        if not row.numel():
            return
        offset, length = _PLACE.unpack(name[_HANDLE_BYTES:])
        if length != row.numel():
            raise SMPError(f"the sending stage has announced {length} bytes, and {row.numel()} are expected")
        source = self._address(name[:_HANDLE_BYTES]) + offset
        _call(
            "cuMemcpyAsync",
            ctypes.c_uint64(row.data_ptr()),
            ctypes.c_uint64(source),
            ctypes.c_size_t(length),
            ctypes.c_void_p(current_stream().cuda_stream),
        )

    def _address(self, handle: bytes) -> int:
        """Where another process's allocation is in this one."""
        if handle in self._open:
            self._open.move_to_end(handle)
            return self._open[handle]
        while len(self._open) >= _MOST_OPEN:
            module(home()).synchronize()  # copies out of it may be under way
            _, oldest = self._open.popitem(last=False)
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(oldest))
        address = ctypes.c_uint64()
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
            hint="the sending process has ended, or the devices cannot reach each other, or the ranks run in "
            "containers that do not share IPC: SMP_LITE_WIRE=mpi goes through the host's memory",
        )
        self._open[handle] = address.value
        return address.value

    def event(self) -> Any:
        return module(home()).Event(interprocess=True)

    def handle(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def wait(self, handle: bytes) -> None:
        if handle not in self._events:
            self._events[handle] = module(home()).Event.from_ipc_handle(home(), handle)
        current_stream().wait_event(self._events[handle])


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *args: Any, hint: str = "") -> None:
    driver = _driver()
    code = getattr(driver, function)(*args)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "an unknown error"
        raise SMPError(f"CUDA's driver, {function}: {said} ({code}){'; ' + hint if hint else ''}")
