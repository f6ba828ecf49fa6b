"""A wire over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...devices import host_memory
from ...record.values.placed import TensorMeta
from ..layout import arrived, incoming_bytes, outgoing
from .wire import Transfer

__all__ = ["MPIWire"]


class MPIWire:
    """CPU tensors over MPI, as bytes from and into their own storage.

    What moves a message while its sender computes, and so calls no MPI, is Open MPI's affair (5.0, two ranks,
    the sender computes for 20 ms after ``Isend``; microseconds until the receiver, which waits, has it):

    ============================================  ======  =====  =====
    transport                                     64 KiB  1 MiB  4 MiB
    ============================================  ======  =====  =====
    shared memory, both wait                          10    100    620
    shared memory                                     17    136    670
    shared memory without copies by the kernel     20000  23000  22000
    TCP                                            32000  32000  32000
    TCP, ``btl_tcp_progress_thread``                 165    510   2500
    ============================================  ======  =====  =====

    In shared memory the receiver takes the message out of the sender's memory by itself (Linux's
    cross-memory attach), so no thread of ours is needed: a receiver that has computed meanwhile finds the
    copy still to do, 0.2 ms for 1 MiB. Where a container forbids that call, all beyond 32 KiB waits for the
    sender's next call of MPI; larger limits for eager messages have not changed that. Over TCP a thread of
    Open MPI's own helps, which our launcher asks for between hosts.

    Args:
        comm: a communicator for this wire alone.
        rank_of_stage: for each stage the communicator's rank that holds it.
    """

    def __init__(self, comm: object, rank_of_stage: Sequence[int]) -> None:
        from mpi4py import MPI

        self._status = MPI.Status()  # of the receive that was polled last
        self._address, self._byte = MPI.buffer.fromaddress, MPI.BYTE
        self.comm: MPI.Comm = comm  # type: ignore[assignment]
        self.rank_of_stage = rank_of_stage

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        parcel, num_bytes = outgoing(tensor, meta)
        request = self.comm.Isend(self._buffer(parcel, num_bytes), dest=self.rank_of_stage[stage])
        return _Sending(request, parcel)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        num_bytes = incoming_bytes(meta)
        message = host_memory(num_bytes)
        request = self.comm.Irecv(self._buffer(message, num_bytes), source=self.rank_of_stage[stage])
        return _Receiving(self, request, message, meta)

    def _buffer(self, tensor: torch.Tensor, num_bytes: int) -> list[object]:
        return [self._address(tensor.data_ptr(), num_bytes), self._byte]

    def ended(self, request: Any) -> int | None:
        """How many bytes a receive has brought; None: it has not ended."""
        return int(self._status.Get_count(self._byte)) if request.Test(self._status) else None


class _Sending:
    __slots__ = ("_message", "_request")

    def __init__(self, request: Any, message: torch.Tensor) -> None:
        self._request: Any = request
        self._message = message  # its memory is in use until the request ends

    def done(self) -> bool:
        if self._request is not None and self._request.Test():
            self._request = None
        return self._request is None

    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a send carries no result")


class _Receiving:
    __slots__ = ("_message", "_meta", "_num_bytes", "_request", "_wire")

    def __init__(self, wire: MPIWire, request: Any, message: torch.Tensor, meta: TensorMeta) -> None:
        self._wire, self._request, self._message, self._meta = wire, request, message, meta
        self._num_bytes: int | None = None

    def done(self) -> bool:
        if self._num_bytes is None:
            self._num_bytes = self._wire.ended(self._request)
        return self._num_bytes is not None

    def tensor(self) -> torch.Tensor:
        assert self._num_bytes is not None
        return arrived(self._message, self._meta, self._num_bytes)
