"""Collectives that devices do among themselves (NCCL), queued on a stream of their own.

The host queues one and goes on. It begins when the stream that computes has come to where it was queued, and
that stream waits for its end only where the result is asked for (``Pending.done()``, which is true at once):
so what is started during a backward runs beside it. No host waits for a device, and each tensor stays until
the stream that computes has been told to wait.

**Rounding.** A sum over two ranks has the bits that gloo and MPI give on the host: two numbers have one sum.
Over more ranks a backend adds in an order of its own (NCCL chooses by size, ranks and machine), which rounds
otherwise than theirs; all ranks get the same bits. 16-bit floats of more than two ranks are summed in 32 bits
and rounded once, as on MPI.

**Failures.** A member that never comes leaves the others' devices waiting, not their hosts, which notice when
they look at a result. One that does not end within the watchdog's limit ends the job by a named error
(:mod:`.watch`). What nobody asks for any more, since a step has failed meanwhile, keeps its memory all
the same: the device may still write there. Those of members that know of a failure are aborted
(:meth:`QueuedCollectives.abort`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...device_streams import queue_behind, side_stream, within
from ...devices import event, home
from ...errors import SMPError
from ..collectives import Pending
from .groups import abort
from .watch import Watched

__all__ = ["Queued", "QueuedCollectives"]

# Named otherwise since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}


class QueuedCollectives:
    """See :class:`~.collectives.Collectives`; for tensors of this process's device.

    Args:
        make_group: gives, when it is first needed, a process group that carries them; collective over the
            members, of which each is known to have come when it returns.
        ranks: world ranks of the members.
    """

    def __init__(self, make_group: Callable[[], Any], ranks: Sequence[int]) -> None:
        self.size = len(ranks)
        self._make = make_group
        self._group: Any = None
        self._stream = side_stream()
        self._watched = Watched(ranks)
        self._unread: list[Queued] = []

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM

        def run(group: Any) -> None:
            work = self._summable(tensor)
            _wait(dist.all_reduce(work, kind, group=group, async_op=True))
            _put(work, tensor)

        return self._queue(run, tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        def run(group: Any) -> None:
            work = self._summable(tensor)
            _wait(dist.reduce(_real(work), group_dst=root, group=group, async_op=True))
            _put(work, tensor)

        return self._queue(run, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        def run(group: Any) -> None:
            _wait(dist.broadcast(_bytes(tensor), group_src=root, group=group, async_op=True))

        return self._queue(run, tensor)

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        def run(group: Any) -> None:
            _wait(_all_gather(_bytes(all_of_them), _bytes(mine), group=group, async_op=True))

        return self._queue(run, mine, all_of_them)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        def run(group: Any) -> None:
            sent = self._summable(parts)
            got = mine if sent.dtype == mine.dtype else torch.empty_like(mine, dtype=sent.dtype)
            _wait(_reduce_scatter(_real(got), _real(sent), group=group, async_op=True))
            _put(got, mine)

        return self._queue(run, parts, mine)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        def run(group: Any) -> None:
            _wait(dist.all_to_all_single(_bytes(got), _bytes(sent), group=group, async_op=True))

        return self._queue(run, sent, got)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        def run(group: Any) -> None:
            # Together, or each side's send would hold up its receive on the device.
            both = [
                dist.P2POp(dist.isend, _bytes(sent), group=group, group_peer=dest),
                dist.P2POp(dist.irecv, _bytes(got), group=group, group_peer=source),
            ]
            for work in dist.batch_isend_irecv(both):
                _wait(work)

        return self._queue(run, sent, got)

    def abort(self) -> None:
        """What is under way ends, if it can; only for a group that nobody else uses."""
        if self._group is not None:
            abort(self._group)
        self._watched.forget()
        self._unread.clear()

    def _queue(self, run: Callable[[Any], None], *tensors: torch.Tensor) -> Pending:
        """``run`` queues on the stream of collectives, after what the current stream has computed."""
        if self._group is None:
            self._connect()
        computed = event()
        try:
            with torch.no_grad(), within(self._stream):
                queue_behind(computed)
                run(self._group)
                ended = event()
        except RuntimeError as error:
            raise SMPError(
                f"{self._watched.name} could not be started: {str(error).splitlines()[0]}"
            ) from error
        self._watched.note(computed, ended)
        queued = Queued(ended, tensors)
        self._unread = [*[each for each in self._unread if not each.is_read], queued]
        return queued

    def _connect(self) -> None:
        """The first collective connects the members, which takes all of them at the same time."""
        self._group = self._watched.group = self._make()
        self.all_reduce(torch.zeros(1, device=home())).done()

    def _summable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy on the current stream in a type in which it may be summed."""
        is_rounded_once = self.size == 2 and tensor.is_floating_point()
        wider = None if is_rounded_once else _SUMMED_AS.get(tensor.dtype)
        return tensor if wider is None else tensor.to(wider)


class Queued:
    """Done as soon as it is queued; the stream that asks waits. Its memory stays until then."""

    def __init__(self, ended: Any, memory: Sequence[torch.Tensor]) -> None:
        self._ended = ended
        self._memory: Sequence[torch.Tensor] | None = memory

    @property
    def is_read(self) -> bool:
        """Whether what computes has been told to wait."""
        return self._memory is None

    def done(self) -> bool:
        if self._memory is not None:
            queue_behind(self._ended)
            self._memory = None
        return True


def _wait(work: Any) -> None:
    """The current stream does, not the host."""
    if work is not None:
        work.wait()


def _put(work: torch.Tensor, target: torch.Tensor) -> None:
    if work is not target:
        target.copy_(work)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved: process groups do not know every type."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
