"""Gradients of sharded parameters: each rank gets the mean for its piece.

A unit's gradients are scattered as soon as all of them are final, which gives their memory back, and then
summed over the ranks that hold the same pieces. Where one reduction may not have so many elements, a unit has
several, and a parameter that is larger by itself travels in parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ...comm.collectives import Collectives, Pending
from ...devices import is_host
from ...nn.guarding import piece_like
from ..sharded.parameters import ShardGroup
from .reducer import Reducer, _Bucket, refuse_sparse

__all__ = ["PieceReducer"]


class PieceReducer(Reducer):
    """Reduces the gradients of sharded parameters to their pieces.

    Args:
        groups: whose members have one rule.
        everybody: collectives over all ranks that contribute.
        sharing: collectives over the axis of the pieces.
        same: collectives over the ranks that hold the same pieces; None: there are no others.
        divisor, overlap, members: as of :class:`~.reducer.Reducer`.
        most_elements: in one reduction; None: those of a group.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        everybody: Collectives,
        sharing: Collectives,
        same: Collectives | None,
        *,
        divisor: int,
        overlap: bool,
        most_elements: int | None = None,
        members: Sequence[int] = (),
    ) -> None:
        super().__init__(
            (),
            everybody,
            divisor=divisor,
            bucket_cap_bytes=0,
            overlap=overlap,
            as_views=False,
            members=members,
        )
        self._sharing, self._same = sharing, same
        self.largest = 0
        """Elements of the largest reduction so far; for tests."""
        self._pieces: dict[int, tuple[int, int]] = {}  # of each parameter, in its bucket's row
        # Of each rank's row; at least one column.
        self._columns = None if most_elements is None else max(1, most_elements // sharing.size)
        for group in reversed(groups):
            self._buckets += reversed(self._buckets_of(group))
        self._bucket_of.update({id(p): bucket for bucket in self._buckets for p in bucket.parameters})

    def _buckets_of(self, group: ShardGroup) -> list[_Bucket]:
        """Parameters of a group that travel together, as many as go into one reduction."""
        found: list[_Bucket] = []
        start = 0
        for parameter in group.parameters:
            if not parameter.requires_grad:
                continue
            end = start + parameter.numel()
            if not found or (self._columns is not None and end > self._columns):
                found.append(_Bucket([]))
                start, end = 0, parameter.numel()
            found[-1].parameters.append(parameter)
            self._pieces[id(parameter)] = (start, end)
            start = end
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that it reduces."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self._buckets[self._next]
        ranks = self._sharing.size
        _, length = self._pieces[id(bucket.parameters[-1])]
        first = bucket.parameters[0]
        # A device waits for what is asked after, and then gives its memory back: so one stays under way.
        for earlier in self._buckets[: self._next if is_host(first.device) else max(0, self._next - 1)]:
            if earlier.pending is not None:
                earlier.pending.done()  # gives its memory back, if so
        rows = torch.zeros(ranks, length, dtype=first.dtype, device=first.device)
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                refuse_sparse(parameter)
                start, end = self._pieces[id(parameter)]
                _spread(parameter.grad.reshape(-1), rows[:, start:end])
                # Only whether there is one still matters: its memory is free.
                is_here = parameter.shape == parameter.grad.shape
                nothing = parameter.grad.new_full((), math.nan).expand_as(parameter.grad)
                parameter.grad = nothing if is_here else None
        rows.div_(self.divisor)
        bucket.flat = rows.new_empty(length)
        columns = length if self._columns is None else min(length, self._columns)
        parts = [
            (rows[:, start : start + columns].contiguous(), bucket.flat[start : start + columns])
            for start in range(0, length, columns)
        ]
        started = [(self._sharing.reduce_scatter(theirs, mine), theirs) for theirs, mine in parts]
        self.largest = max(self.largest, *(theirs.numel() for theirs, _ in parts))
        bucket.pending = _All([_Kept(pending, theirs) for pending, theirs in started])
        self._next += 1

    def _wait(self, bucket: _Bucket, number: int) -> None:
        super()._wait(bucket, number)
        if self._same is not None:
            assert bucket.flat is not None
            columns = len(bucket.flat) if self._columns is None else self._columns
            bucket.pending = _All([self._same.all_reduce(part) for part in bucket.flat.split(columns)])
            super()._wait(bucket, number)

    def _put_in_place(self, bucket: _Bucket, used: Sequence[bool]) -> None:
        assert bucket.flat is not None
        for parameter, was_used in zip(bucket.parameters, used, strict=True):
            start, end = self._pieces[id(parameter)]
            gradient = bucket.flat[start:end].clone() if was_used else None
            parameter.grad = piece_like(gradient, parameter)


class _All:
    """Several collectives as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = list(pending)

    def done(self) -> bool:
        self._pending = [each for each in self._pending if not each.done()]
        return not self._pending


class _Kept:
    """A collective, with the memory that it reads until it has ended."""

    def __init__(self, pending: Pending, memory: torch.Tensor) -> None:
        self._pending = pending
        self._memory: torch.Tensor | None = memory

    def done(self) -> bool:
        is_done = self._pending.done()
        if is_done:
            self._memory = None
        return is_done


def _spread(flat: torch.Tensor, rows: torch.Tensor) -> None:
    """Puts the elements into rows, one row after another; the rest of the rows stays as it is."""
    length = rows.shape[1]
    full, rest = divmod(len(flat), length)
    rows[:full].copy_(flat[: full * length].view(full, length))
    if rest:
        rows[full, :rest].copy_(flat[full * length :])
