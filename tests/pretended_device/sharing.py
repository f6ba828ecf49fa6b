"""Memory of the pretended device that other processes read: really theirs, taken by the kernel's copy.

If its process has freed a row, or written over it, before the other one copies, then that one sees it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import torch

from smp_lite.comm.on_device.sharing import SHARED_BY
from smp_lite.errors import SMPError

from .lateness import check_waited
from .memory import NAME, on_host
from .order import touch
from .streams import Stream

__all__ = ["PretendedSharing", "offer"]

_PLACE = struct.Struct("=QQQ")  # process, address, length
_HANDLE = struct.Struct("=QQ")  # process, number of the event


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Event:
    """Everything before it is done: the device has one stream, in which nothing is late but copies out."""

    _count = 0

    def __init__(self) -> None:
        type(self)._count += 1
        self.number = self._count
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True


class PretendedSharing:
    """See :class:`smp_lite.comm.on_device.sharing.Sharing`."""

    name_bytes = _PLACE.size
    handle_bytes = _HANDLE.size

    def name(self, row: torch.Tensor) -> bytes:
        host = on_host(row, {})
        return _PLACE.pack(os.getpid(), host.data_ptr(), host.numel())

    def copy(self, name: bytes, row: torch.Tensor) -> None:
        process, address, length = _PLACE.unpack(name)
        assert length == row.numel()
        if not length:
            return
        mine = on_host(row, {})
        check_waited(row)
        touch(row.untyped_storage(), row.device.index or 0)
        here, there = _Vector(mine.data_ptr(), length), _Vector(address, length)
        libc = ctypes.CDLL(None, use_errno=True)
        read = libc.process_vm_readv
        read.restype = ctypes.c_ssize_t
        got = read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != length:
            raise SMPError(f"process {process} cannot be read: {os.strerror(ctypes.get_errno())}")

    def event(self) -> _Event:
        return _Event()

    def handle(self, event: Any) -> bytes:
        assert event.is_recorded
        return _HANDLE.pack(os.getpid(), event.number)

    def wait(self, handle: bytes) -> None:
        process, number = _HANDLE.unpack(handle)
        assert process != os.getpid() and number


def offer() -> None:
    """From now on the device has it."""
    SHARED_BY[NAME] = (lambda device, local_size: "", PretendedSharing)
    record = torch.Tensor.record_stream

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if not isinstance(stream, Stream):  # in the device's one stream memory is used in order
            record(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
