"""Collectives over a group of ranks, started now and finished later.

Two makes of one interface for tensors of the host: :class:`C10dCollectives` over a torch process group
(``ddp: True``, and all of a job without MPI) and :class:`MPICollectives` (the mp group of an MPI job, and
``horovod: True``, as a Horovod job would do it). Those for tensors of devices are in
:mod:`.on_device.collectives`.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .unawaited import keep
from .waiting import broken_connections_named
from .works import Works


class Pending(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Polls; once True, the tensor holds the result."""


class Collectives(Protocol):
    """In place, on contiguous tensors; every member must start the same ones in the same order."""

    size: int

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        """Sum, or ``max``, over the group."""

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        """Sum over the group, on group rank ``root``; on the others the tensor's content is lost."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        """From group rank ``root``."""

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        """Every member's ``mine`` as a row of ``all_of_them``, by group rank."""

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        """In ``mine`` the sum over the group of the rows of ``parts`` that are this member's."""

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        """Row i of ``sent`` goes to group rank i, row i of ``got`` comes from it."""

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        """Sends to one group rank and receives from one."""


class OneMember:
    """Of a group of one rank: what it has is the sum already."""

    size = 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        return _Done()

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        return _Done()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        return _Done()

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        all_of_them.copy_(mine.unsqueeze(0))
        return _Done()

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        mine.copy_(parts[0])
        return _Done()

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        got.copy_(sent)
        return _Done()

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        got.copy_(sent)
        return _Done()


class _Done:
    def done(self) -> bool:
        return True


class C10dCollectives:
    """Over a torch process group, for tensors of the host."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self._works = Works(group, by_gloo=True)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        return _Work(dist.all_reduce(tensor, kind, group=self.group, async_op=True))

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        return _Work(dist.reduce(tensor, group_dst=root, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        return _Work(dist.broadcast(tensor, group_src=root, group=self.group, async_op=True))

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        return _Work(dist.all_gather(list(all_of_them), mine, group=self.group, async_op=True))

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        # gloo's own goes on only while somebody waits for it.
        got = torch.empty_like(parts)
        return _Summed(self.all_to_all(parts, got), got, mine)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        return _Work(dist.all_to_all_single(got, sent, group=self.group, async_op=True))

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        return _All(
            self._works.polled(dist.isend(sent, group_dst=dest, group=self.group), "send", dest),
            self._works.polled(dist.irecv(got, group_src=source, group=self.group), "receive", source),
        )


class _Work:
    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():
            with broken_connections_named():
                self._work.wait()
            self._work = None
        return self._work is None


class _Summed:
    """Rows that arrive, and are added up then; in 32 bits, as by MPI."""

    def __init__(self, pending: Pending, rows: torch.Tensor, target: torch.Tensor) -> None:
        self._pending, self._target = pending, target
        self._rows: torch.Tensor | None = rows

    def done(self) -> bool:
        if self._rows is not None and self._pending.done():
            is_short = self._rows.dtype in (torch.float16, torch.bfloat16)
            self._target.copy_(self._rows.sum(0, dtype=torch.float32 if is_short else self._rows.dtype))
            self._rows = None
        return self._rows is None


class _All:
    """Several, as one."""

    def __init__(self, *parts: Pending) -> None:
        self._parts = parts

    def done(self) -> bool:
        done = [part.done() for part in self._parts]  # each is polled
        return all(done)


class MPICollectives:
    """Over an MPI communicator; 16-bit floats, which MPI does not know, are summed in 32 bits."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.size = comm.Get_size()
        self._types = {
            torch.float32: MPI.FLOAT,
            torch.float64: MPI.DOUBLE,
            torch.int64: MPI.INT64_T,
            torch.int32: MPI.INT32_T,
            torch.uint8: MPI.UINT8_T,
            torch.complex64: MPI.C_FLOAT_COMPLEX,
            torch.complex128: MPI.C_DOUBLE_COMPLEX,
        }

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        work = self._summable(tensor)
        kind = self._mpi.MAX if op == "max" else self._mpi.SUM
        request = self.comm.Iallreduce(self._mpi.IN_PLACE, self._typed(work), kind)
        return _Request(request, work, tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        work = self._summable(tensor)
        if self.comm.Get_rank() == root:
            request = self.comm.Ireduce(self._mpi.IN_PLACE, self._typed(work), root=root)
        else:
            request = self.comm.Ireduce(self._typed(work), None, root=root)
        return _Request(request, work, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        request = self.comm.Ibcast([self._memory(tensor), self._mpi.BYTE], root=root)
        return _Request(request, tensor, tensor)

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        request = self.comm.Iallgather(
            [self._memory(mine), self._mpi.BYTE], [self._memory(all_of_them), self._mpi.BYTE]
        )
        return _Request(request, mine, mine, keep=all_of_them)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        sent, got = self._summable(parts), self._summable(mine)
        request = self.comm.Ireduce_scatter_block(self._typed(sent), self._typed(got))
        return _Request(request, got, mine, keep=sent)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        request = self.comm.Ialltoall(
            [self._memory(sent), self._mpi.BYTE], [self._memory(got), self._mpi.BYTE]
        )
        return _Request(request, got, got, keep=sent)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        send = self.comm.Isend([self._memory(sent), self._mpi.BYTE], dest=dest)
        receive = self.comm.Irecv([self._memory(got), self._mpi.BYTE], source=source)
        return _All(_Request(send, sent, sent), _Request(receive, got, got))

    def _summable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype in self._types else tensor.float()

    def _typed(self, tensor: torch.Tensor) -> list[Any]:
        return [self._memory(tensor), self._types[tensor.dtype]]

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class _Request:
    def __init__(self, request: Any, work: torch.Tensor, target: torch.Tensor, keep: Any = None) -> None:
        self._request, self._work, self._target, self._keep = request, work, target, keep

    def done(self) -> bool:
        if self._request is not None and self._request.Test():
            if self._work is not self._target:
                self._target.copy_(self._work)
            self._request = None
        return self._request is None

    def __del__(self) -> None:
        """Nobody waits any longer, after an error: peers may come yet, and MPI writes then."""
        if self._request is not None and _is_over is not None and not _is_over():  # None: Python ends
            self._target = self._work  # whose memory is another's by now
            keep(self, None, look=False)


def _is_over() -> bool:
    if sys.is_finalizing():
        return True
    from mpi4py import MPI

    return MPI.Is_finalized()
