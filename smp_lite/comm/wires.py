"""Wires: how tensors travel between the stages of one mp group.

A wire does two things, both without blocking: ``send`` a tensor to a stage, and ``receive`` one from a
stage. Each returns a :class:`Transfer` to poll. Sends and receives between two stages are matched in
order; the lowering pass puts them in the same order at both ends. A tensor arrives with the strides that it
was sent with, also where they are not those that were recorded, as with gradients: they travel behind the
elements, over MPI only where the receiver would not guess them.

Makes: :class:`MemoryWire` (all stages in one process),
:class:`MPIWire` (CPU tensors, read and written in place) and :class:`C10dWire` (a torch process group).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..record.values.placed import TensorMeta
from .layout import arrived, handed_over, incoming_bytes, outgoing
from .waiting import broken_connections_named


class Transfer(Protocol):
    """One send or receive under way."""

    def done(self) -> bool:
        """Polls; once True, stays True."""

    def tensor(self) -> torch.Tensor:
        """What was received; only after ``done()``."""


class Wire(Protocol):
    """Tensors to and from the other stages."""

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        """Starts sending; the transfer keeps what it needs alive."""

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        """Posts a receive."""


class MemoryWire:
    """The stages of one process: a tensor is handed over as it is, in a queue for each pair of stages."""

    def __init__(self, stage_index: int, queues: dict[tuple[int, int], deque[torch.Tensor]]) -> None:
        self.stage_index = stage_index
        self.queues = queues
        self._claims: dict[int, deque[_Queued]] = {}

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        self.queues.setdefault((self.stage_index, stage), deque()).append(handed_over(tensor))
        return _Done()

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        queue = self.queues.setdefault((stage, self.stage_index), deque())
        return _Queued(queue, self._claims.setdefault(stage, deque()))


class _Done:
    def done(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a send carries no result")


class _Queued:
    """A posted receive; receives of one pair are served in the order of posting."""

    def __init__(self, queue: deque[torch.Tensor], claims: deque[_Queued]) -> None:
        self._queue, self._claims = queue, claims
        self._tensor: torch.Tensor | None = None
        claims.append(self)

    def done(self) -> bool:
        while self._queue and self._claims:
            self._claims.popleft()._tensor = self._queue.popleft()
        return self._tensor is not None

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor


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

        self._mpi = MPI
        self.comm: MPI.Comm = comm  # type: ignore[assignment]
        self.rank_of_stage = rank_of_stage

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        parcel, num_bytes = outgoing(tensor, meta)
        request = self.comm.Isend(self._buffer(parcel, num_bytes), dest=self.rank_of_stage[stage])
        return _Request(self._mpi, request, parcel)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        num_bytes = incoming_bytes(meta)
        message = torch.empty(num_bytes, dtype=torch.uint8)
        request = self.comm.Irecv(self._buffer(message, num_bytes), source=self.rank_of_stage[stage])
        return _Request(self._mpi, request, message, meta)

    def _buffer(self, tensor: torch.Tensor, num_bytes: int) -> list[object]:
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), num_bytes)
        return [memory, self._mpi.BYTE]


class _Request:
    def __init__(
        self, mpi: Any, request: object, message: torch.Tensor, meta: TensorMeta | None = None
    ) -> None:
        self._request: object | None = request
        self._message = message  # its memory is in use until the request ends
        self._meta = meta
        self._status = None if meta is None else mpi.Status()
        self._byte = mpi.BYTE

    def done(self) -> bool:
        if self._request is not None and self._request.Test(self._status):  # type: ignore[attr-defined]
            self._request = None
        return self._request is None

    def tensor(self) -> torch.Tensor:
        assert self._meta is not None and self._status is not None
        return arrived(self._message, self._meta, self._status.Get_count(self._byte))


class C10dWire:
    """A torch process group (gloo on CPU, NCCL with one GPU for each rank).

    gloo's point-to-point works do not say that they have ended until somebody waits for them, so a thread
    for each direction and peer does, in the order of posting, which is the order in which they end.

    Args:
        group: the process group of the mp group.
        rank_of_stage: for each stage the group's rank that holds it.
    """

    def __init__(self, group: object, rank_of_stage: Sequence[int]) -> None:
        self.group = group
        self.rank_of_stage = rank_of_stage
        self._needs_waiter = dist.get_backend(group) == "gloo"  # type: ignore[arg-type]
        self._lanes: dict[tuple[str, int], _Lane] = {}

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        message, _ = outgoing(tensor, meta, always_told=True)  # both ends name the same length
        work = dist.isend(message, group=self.group, group_dst=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return self._transfer(work, message, meta, ("send", stage))

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        message = torch.empty(incoming_bytes(meta), dtype=torch.uint8, device=meta.device)
        work = dist.irecv(message, group=self.group, group_src=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return self._transfer(work, message, meta, ("receive", stage))

    def _transfer(
        self, work: object, message: torch.Tensor, meta: TensorMeta, direction: tuple[str, int]
    ) -> Transfer:
        if not self._needs_waiter:
            return _Work(work, message, meta)
        if direction not in self._lanes:
            self._lanes[direction] = _Lane("smp-{}-{}".format(*direction))
        return _Awaited(self._lanes[direction].wait_for(work), message, meta)


class _Lane:
    """A thread that waits for works, one after another.

    A daemon and no executor: a process that gives up, because a peer never sent, must be able to end.
    """

    def __init__(self, name: str) -> None:
        self._works: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait_for(self, work: object) -> Future[None]:
        ended: Future[None] = Future()
        self._works.put((work, ended))
        return ended

    def _run(self) -> None:
        while True:
            work, ended = self._works.get()
            try:
                work.wait()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            del work, ended  # a tensor must not live until the next one


class _Work:
    def __init__(self, work: object, message: torch.Tensor, meta: TensorMeta) -> None:
        self._work: object | None = work
        self._message, self._meta = message, meta

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():  # type: ignore[attr-defined]
            with broken_connections_named():
                self._work.wait()  # type: ignore[attr-defined]
            self._work = None
        return self._work is None

    def tensor(self) -> torch.Tensor:
        return arrived(self._message, self._meta, len(self._message))


class _Awaited:
    def __init__(self, ended: Future[None], message: torch.Tensor, meta: TensorMeta) -> None:
        self._ended, self._message, self._meta = ended, message, meta

    def done(self) -> bool:
        if self._ended.done():
            with broken_connections_named():
                self._ended.result()
            return True
        return False

    def tensor(self) -> torch.Tensor:
        return arrived(self._message, self._meta, len(self._message))
