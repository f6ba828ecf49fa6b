"""Wires: how tensors travel between the stages of one mp group.

A wire does two things, both without blocking: ``send`` a tensor to a stage, and ``receive`` one from a
stage. Each returns a :class:`Transfer` to poll. Sends and receives between two stages are matched in
order; the lowering pass puts them in the same order at both ends. Makes: :class:`MemoryWire` (all stages in
one process), :class:`MPIWire` (CPU tensors, read and written in place) and :class:`C10dWire` (a torch
process group).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist

from ..record.placed import TensorMeta
from .layout import arrival, departure


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
        self.queues.setdefault((self.stage_index, stage), deque()).append(departure(tensor, meta))
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
        tensor = departure(tensor, meta)
        request = self.comm.Isend(self._buffer(tensor, meta), dest=self.rank_of_stage[stage])
        return _Request(request, tensor)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        tensor = arrival(meta)
        request = self.comm.Irecv(self._buffer(tensor, meta), source=self.rank_of_stage[stage])
        return _Request(request, tensor)

    def _buffer(self, tensor: torch.Tensor, meta: TensorMeta) -> list[object]:
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), meta.num_bytes)
        return [memory, self._mpi.BYTE]


class _Request:
    def __init__(self, request: object, tensor: torch.Tensor) -> None:
        self._request: object | None = request
        self._tensor = tensor  # its memory is in use until the request ends

    def done(self) -> bool:
        if self._request is not None and self._request.Test():  # type: ignore[attr-defined]
            self._request = None
        return self._request is None

    def tensor(self) -> torch.Tensor:
        return self._tensor


class C10dWire:
    """A torch process group (gloo on CPU, NCCL with one GPU for each rank).

    gloo's point-to-point works do not say that they have ended until somebody waits for them, so a thread
    for each direction and peer does, in the order of posting, which is the order in which they end.

    Args:
        group: the process group of the mp group.
        rank_of_stage: for each stage the *world* rank that holds it.
    """

    def __init__(self, group: object, rank_of_stage: Sequence[int]) -> None:
        self.group = group
        self.rank_of_stage = rank_of_stage
        self._needs_waiter = dist.get_backend(group) == "gloo"  # type: ignore[arg-type]
        self._waiters: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        flat = _flat(departure(tensor, meta), meta)
        work = dist.isend(flat, self.rank_of_stage[stage], group=self.group)  # type: ignore[arg-type]
        return self._transfer(work, flat, flat, ("send", stage))

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        tensor = arrival(meta)
        flat = _flat(tensor, meta)
        work = dist.irecv(flat, self.rank_of_stage[stage], group=self.group)  # type: ignore[arg-type]
        return self._transfer(work, tensor, flat, ("receive", stage))

    def _transfer(
        self, work: object, tensor: torch.Tensor, flat: torch.Tensor, lane: tuple[str, int]
    ) -> Transfer:
        if not self._needs_waiter:
            return _Work(work, tensor, flat)
        if lane not in self._waiters:
            self._waiters[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"smp-{lane[0]}-{lane[1]}")
        return _Awaited(self._waiters[lane].submit(work.wait), tensor, flat)  # type: ignore[attr-defined]


def _flat(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor's bytes as one row: process groups know neither all dtypes nor all layouts."""
    if not meta.num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=meta.device)
    row = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return row.view(torch.uint8)


class _Work:
    def __init__(self, work: object, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        self._work: object | None = work
        self._tensor, self._flat = tensor, flat

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():  # type: ignore[attr-defined]
            self._work.wait()  # type: ignore[attr-defined]  # raises what went wrong
            self._work = None
        return self._work is None

    def tensor(self) -> torch.Tensor:
        return self._tensor


class _Awaited:
    def __init__(self, future: Future[object], tensor: torch.Tensor, flat: torch.Tensor) -> None:
        self._future, self._tensor, self._flat = future, tensor, flat

    def done(self) -> bool:
        if self._future.done():
            self._future.result()  # raises what went wrong
            return True
        return False

    def tensor(self) -> torch.Tensor:
        return self._tensor
