"""Gradients of sharded parameters: each rank gets the mean for its piece.

A unit's gradients are scattered as soon as all of them are final, which gives their memory back, and then
summed over the ranks that hold the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ...comm.collectives import Collectives, Pending
from ...nn.guarding import guarded
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
        divisor, overlap: as of :class:`~.reducer.Reducer`.
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
    ) -> None:
        super().__init__((), everybody, divisor=divisor, bucket_cap_bytes=0, overlap=overlap, as_views=False)
        self._sharing, self._same = sharing, same
        self._pieces: dict[int, tuple[int, int]] = {}  # of each parameter, in its bucket's row
        for group in reversed(groups):
            bucket, start = _Bucket([]), 0
            for parameter in group.parameters:
                if parameter.requires_grad:
                    bucket.parameters.append(parameter)
                    self._pieces[id(parameter)] = (start, start + parameter.numel())
                    start += parameter.numel()
            if bucket.parameters:
                self._buckets.append(bucket)
                self._bucket_of.update(dict.fromkeys(map(id, bucket.parameters), bucket))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that it reduces."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self._buckets[self._next]
        ranks = self._sharing.size
        _, length = self._pieces[id(bucket.parameters[-1])]
        rows = torch.zeros(ranks, length, dtype=bucket.parameters[0].dtype)
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
        bucket.pending = _Kept(self._sharing.reduce_scatter(rows, bucket.flat), rows)
        self._next += 1

    def _wait(self, bucket: _Bucket, number: int) -> None:
        super()._wait(bucket, number)
        if self._same is not None:
            assert bucket.flat is not None
            bucket.pending = self._same.all_reduce(bucket.flat)
            super()._wait(bucket, number)

    def _put_in_place(self, bucket: _Bucket, used: Sequence[bool]) -> None:
        assert bucket.flat is not None
        for parameter, was_used in zip(bucket.parameters, used, strict=True):
            start, end = self._pieces[id(parameter)]
            parameter.grad = guarded(bucket.flat[start:end].clone()) if was_used else None


class _Kept:
    """A collective, with the memory that it reads."""

    def __init__(self, pending: Pending, memory: torch.Tensor) -> None:
        self._pending, self._memory = pending, memory

    def done(self) -> bool:
        return self._pending.done()


def _spread(flat: torch.Tensor, rows: torch.Tensor) -> None:
    """Puts the elements into rows, one row after another; the rest of the rows stays as it is."""
    length = rows.shape[1]
    full, rest = divmod(len(flat), length)
    rows[:full].copy_(flat[: full * length].view(full, length))
    if rest:
        rows[full, :rest].copy_(flat[full * length :])
