"""Collectives of ranks that read each other's memory on the device: such as share a GPU, which NCCL refuses.

Each member names the rows that the others are to read and an event after which what is in there has been
computed, all in one small message between the hosts. Who has everybody's message queues, on a stream of its
own, the waits for the others' events, copies of their rows, and what is to be made of them; and tells the
others by a second message the event after which it has read. Only when a member has that of all others may
its own memory change: what it has made is put there, and the stream that computes waits for it where the
result is asked for. So the host waits for small messages only, never for a device, and what is started during
a backward runs beside it.

Messages go out in the order of the calls, the second ones in that order too, over a group of their own,
whatever is asked for first. Every wait of the process looks after them (:func:`~.waiting.while_waiting`):
a rank whose script does not ask for its result answers all the same as soon as it waits for anything.

**Rounding.** Sums go through the members in the order of their ranks, the same on all of them, 16-bit floats
in 32 bits and rounded once. Over two ranks that is, to the bit, what MPI, gloo and NCCL make.

Memory and events of other processes are a device's :class:`~.sharing.Sharing`; events are used again
in turn, which makes a wait longer at most, since what is waited for then was queued before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ...device_streams import queue_behind, side_stream, within
from ...devices import CPU, event, record
from ..collectives import Collectives, Pending
from ..waiting import while_waiting
from .sharing import Sharing

__all__ = ["Mapped", "MappedCollectives"]

_NUM_EVENTS = 64
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

Read = Callable[[int, torch.Tensor], torch.Tensor]
"""Of a member's index: its row for this rank, as a tensor that is like another one."""


class MappedCollectives:
    """See :class:`~.collectives.Collectives`; for tensors of this process's device.

    Args:
        sharing: what the device offers.
        names: of the host, between the same ranks, for the messages that name memory.
        answers: another one, for those that say it has been read.
        index: of this rank in the group.
    """

    def __init__(self, sharing: Sharing, names: Collectives, answers: Collectives, index: int) -> None:
        self.size, self.index = names.size, index
        self._sharing, self._names, self._answers = sharing, names, answers
        self._stream = side_stream()
        self._computed, self._was_read = _Turns(sharing), _Turns(sharing)
        self._under_way: deque[Mapped] = deque()
        self._unread: list[Mapped] = []
        while_waiting(self)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        def take(read: Read) -> Callable[[], None]:
            total = self._summed(read, tensor, op)
            return lambda: _put(total, tensor)

        return self._start([tensor] * self.size, take, tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        def take(read: Read) -> Callable[[], None]:
            if self.index != root:
                return _nothing
            total = self._summed(read, tensor, "sum")
            return lambda: _put(total, tensor)

        return self._start(self._only({root: tensor}), take, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        def take(read: Read) -> Callable[[], None]:
            if self.index != root:
                _put(read(root, tensor), tensor)
            return _nothing

        is_root = self.index == root
        return self._start([tensor if is_root else None] * self.size, take, tensor)

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        rows = all_of_them.view(self.size, *mine.shape)

        def take(read: Read) -> Callable[[], None]:
            for member, row in enumerate(rows):
                _put(read(member, mine), row)
            return _nothing

        return self._start([mine] * self.size, take, mine, all_of_them)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        rows = parts.view(self.size, *mine.shape)

        def take(read: Read) -> Callable[[], None]:
            total = self._summed(read, mine, "sum")
            return lambda: _put(total, mine)

        return self._start(list(rows), take, parts, mine)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        def take(read: Read) -> Callable[[], None]:
            for member in range(self.size):
                _put(read(member, got[member]), got[member])
            return _nothing

        return self._start(list(sent), take, sent, got)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        def take(read: Read) -> Callable[[], None]:
            _put(read(source, got), got)
            return _nothing

        return self._start(self._only({dest: sent}), take, sent, got)

    def abort(self) -> None:
        """A member has failed: nothing goes on here. What memory is in use stays with who started it."""
        self._under_way.clear()
        self._unread.clear()

    def advance(self) -> None:
        """Goes on with what has been answered."""
        for each in list(self._under_way):
            if not each.take():
                break
        while self._under_way and self._under_way[0].finish():
            self._under_way.popleft()

    def _only(self, rows: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        return [rows.get(member) for member in range(self.size)]

    def _summed(self, read: Read, like: torch.Tensor, op: str) -> torch.Tensor:
        wide = _SUMMED_AS.get(like.dtype, like.dtype)
        total: torch.Tensor | None = None
        for member in range(self.size):
            row = read(member, like)
            if total is None:
                total = row.to(wide, copy=True)
            elif op == "max":
                torch.maximum(total, row.to(wide), out=total)
            else:
                total.add_(row.to(wide))
        assert total is not None
        return total

    def _start(
        self,
        rows: Sequence[torch.Tensor | None],
        take: Callable[[Read], Callable[[], None]],
        *tensors: torch.Tensor,
    ) -> Pending:
        """
        Args:
            rows: for each member what it reads here; None: nothing.
            take: queues what is made of the members' rows; what it returns queues what changes memory that
                they read.
            tensors: stay until the result is asked for.
        """
        mapped = Mapped(self, rows, take, tensors)
        self._under_way.append(mapped)
        self._unread = [*[each for each in self._unread if not each.is_read], mapped]
        self.advance()
        return mapped


class Mapped:
    """One collective. Done when all that it takes is queued; the stream that asks waits for that."""

    def __init__(
        self,
        owner: MappedCollectives,
        rows: Sequence[torch.Tensor | None],
        take: Callable[[Read], Callable[[], None]],
        memory: Sequence[torch.Tensor],
    ) -> None:
        self._owner, self._take = owner, take
        self._rows = [None if row is None else _bytes(row) for row in rows]
        self._memory: Sequence[torch.Tensor] | None = memory
        self._put: Callable[[], None] | None = None
        self._ended: object | None = None
        self._is_queued = False
        sharing = owner._sharing
        self._own = event()  # what this process's own side stream waits for
        named = {id(row): sharing.name(_bytes(row)) for row in rows if row is not None}
        names = [bytes(sharing.name_bytes) if row is None else named[id(row)] for row in rows]
        self._told = _Round(owner._names, b"".join([owner._computed.take(), *names]), owner.size)
        self._read: _Round | None = None

    @property
    def is_read(self) -> bool:
        """Whether what computes has been told to wait."""
        return self._memory is None

    def take(self) -> bool:
        """Queues what is made of the others' rows; whether it has."""
        if self._read is not None:
            return True
        if not self._told.done():
            return False
        owner, sharing = self._owner, self._owner._sharing
        told = self._told.rows()
        own = owner.index

        def read(member: int, like: torch.Tensor) -> torch.Tensor:
            row = self._rows[own] if member == own else None
            if member != own:
                start = sharing.handle_bytes + own * sharing.name_bytes
                row = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=like.device)
                sharing.copy(told[member][start : start + sharing.name_bytes], row)
            assert row is not None
            return row.view(like.dtype).view(like.shape)

        with torch.no_grad(), within(owner._stream):
            queue_behind(self._own)
            for member in range(owner.size):
                if member != own:
                    sharing.wait(told[member][: sharing.handle_bytes])
            self._put = self._take(read)
            self._read = _Round(owner._answers, owner._was_read.take(), owner.size)
        return True

    def finish(self) -> bool:
        """Queues what changes memory that the others have read by then; whether it has."""
        if self._read is None or not self._read.done():
            return False
        owner = self._owner
        assert self._put is not None
        with torch.no_grad(), within(owner._stream):
            for member, handle in enumerate(self._read.rows()):
                if member != owner.index:
                    owner._sharing.wait(handle)
            self._put()
            self._ended = event()
        self._is_queued = True
        return True

    def done(self) -> bool:
        if self._memory is None:
            return True
        if not self._is_queued:
            self._owner.advance()
        if self._is_queued:
            queue_behind(self._ended)
            self._memory = self._put = None
            self._rows = []
        return self._memory is None


class _Round:
    """One small message of each member to all."""

    def __init__(self, collectives: Collectives, message: bytes, size: int) -> None:
        self._mine = torch.tensor(list(message), dtype=torch.uint8, device=CPU)
        self._all = torch.empty(size, len(message), dtype=torch.uint8, device=CPU)
        self._pending = collectives.all_gather(self._mine, self._all)

    def done(self) -> bool:
        return self._pending.done()

    def rows(self) -> list[bytes]:
        return [bytes(row) for row in self._all.tolist()]


class _Turns:
    """Events for other processes, each recorded where it is taken."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._events: deque[object] = deque()

    def take(self) -> bytes:
        """The handle of one that the current stream comes to now."""
        is_new = len(self._events) < _NUM_EVENTS
        found = self._sharing.event() if is_new else self._events.popleft()
        self._events.append(found)
        record(found)
        return self._sharing.handle(found)


def _put(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source.view_as(target))


def _nothing() -> None:
    pass


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
