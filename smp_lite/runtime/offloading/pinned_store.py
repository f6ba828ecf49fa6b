"""A store for the tensors of a device: pinned memory of the host.

Copies run in streams of their own, one for each direction, beside the one that computes. No host waits for
them: each stream waits for the other's events. A copy begins when the computing stream has come to where it
was asked for, since the memory may be in use until then; and what computes next waits for the copy's end
where it needs that (:meth:`Transfer.followed <.store.Transfer.followed>`): before the memory that has left is
given back, and before what has come back is read. So all memory of the device is the computing stream's,
taken and freed in its order, and how much is in use does not depend on how far the host has run ahead.

Both ends of a copy are kept until what computes has been made to wait for it, whoever else lets go of them.

Memory of the host is kept and used again, in rows of a power of two, as torch's own allocator of it takes
them anyway. Each copy from or to a row waits for the one before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ...device_streams import queue_behind, side_stream, within
from ...devices import Event, event, host_memory
from ...errors import SMPError

__all__ = ["PinnedStore"]


@dataclass
class _Row:
    """A row of the host's memory, and the place in a stream where the last copy from or to it has ended."""

    memory: torch.Tensor
    last: Event | None = None


class _Copy:
    """See :class:`~.store.Transfer`."""

    def __init__(self, ended: Event | None, ends: tuple[torch.Tensor, ...]) -> None:
        self._ended = ended  # None: the device does everything at once
        self._ends = ends

    def done(self) -> bool:
        if self._ended is not None and not self._ended.query():
            return False
        self._end()
        return True

    def followed(self) -> bool:
        # Again for each who asks: backward may run in another thread, with a stream of its own.
        queue_behind(self._ended)
        self._ends = ()
        return True

    def wait(self, seconds: float) -> bool:
        return self.followed()

    def is_followed(self) -> bool:
        """Whether its memory may go."""
        return not self._ends

    def _end(self) -> None:
        self._ended, self._ends = None, ()


@dataclass
class PinnedStore:
    """For the tensors of this process's device."""

    name: str = "the host's memory"
    rows_made: int = 0
    _free: dict[int, list[_Row]] = field(default_factory=dict)  # by length
    _under_way: list[_Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # what autograd keeps is freed in its own threads
        self._out, self._in = side_stream(), side_stream()

    def is_working(self) -> bool:
        """Whether transfers end by themselves: the device sees to it."""
        return True

    def place(self, num_bytes: int) -> _Row:
        """Space for so many bytes.

        Raises:
            SMPError: there is none.
        """
        length = _length(num_bytes)
        with self._lock:
            free = self._free.get(length)
            if free:
                return free.pop()
        try:
            memory = host_memory(length)
        except RuntimeError as error:
            raise SMPError(
                f"offload_activations: the host has no {length} bytes of pinned memory more, beside "
                f"{self.rows_made} rows that hold activations until their backward ({error}): write "
                "offload_activations: False, or set fewer active_microbatches"
            ) from error
        self.rows_made += 1
        return _Row(memory)

    def free(self, place: _Row, num_bytes: int) -> None:
        """The space may be used again."""
        with self._lock:
            self._free.setdefault(_length(num_bytes), []).append(place)

    def write(self, tensor: torch.Tensor, place: _Row) -> _Copy:
        """Queues the copy of a one-dimensional tensor of bytes."""
        return self._copy(place.memory[: tensor.numel()], tensor, place, self._out)

    def read(self, tensor: torch.Tensor, place: _Row) -> _Copy:
        """Queues the copy into a one-dimensional tensor of bytes."""
        return self._copy(tensor, place.memory[: tensor.numel()], place, self._in)

    def settle(self) -> None:
        """What the device computes from now on comes after all copies."""
        for copy in self._under_way:
            copy.followed()
        self._under_way.clear()

    def close(self) -> None:
        """The memory goes with the store."""

    def _copy(self, target: torch.Tensor, source: torch.Tensor, row: _Row, stream: Any) -> _Copy:
        self._under_way = [copy for copy in self._under_way if not copy.is_followed()]
        asked = event()
        with within(stream), torch.no_grad():
            queue_behind(asked)
            queue_behind(row.last)
            target.copy_(source, non_blocking=True)
            row.last = event()
        copy = _Copy(row.last, (target, source))
        self._under_way.append(copy)
        return copy


def _length(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()
