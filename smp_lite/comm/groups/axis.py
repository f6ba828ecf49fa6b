"""One axis of the ranks of a stage, and what its members do with tensors together.

Parallel layers (:mod:`smp_lite.nn`) call these inside their forward and backward. Each call is collective
over the axis, returns when this rank has its result, and is polled with the watchdog's limit like every other
wait. It is not differentiable: what the backward of a layer does is the layer's own business.

On a fake tensor a call returns one of the right shape and talks to nobody: so a model is recorded, and
planned without processes. An axis of one rank does nothing at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import SMPError
from ..collectives import Collectives, Pending
from ..on_device.collectives import ByPlace
from ..on_device.queued import Queued
from ..waiting import wait_until

__all__ = ["Axis", "Started", "elements_received"]

Observer = Callable[[str, "Axis", int], Callable[[], None] | None]
"""Is told of a collective's kind, axis and number of elements when it starts; what it returns is called when
it has ended."""


class Axis:
    """The ranks that differ on one axis (or on several, taken as one), as one of them sees them.

    Args:
        name: of the axis, for errors and traces.
        ranks: world ranks, in the order of their indices.
        index: this rank's position among them.
        collectives: makes them, when they are first needed; None where there are no processes.
        look: called while waiting; raises if a member has failed, and so will not come.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        index: int,
        collectives: Callable[[], Collectives] | None = None,
        look: Callable[[Axis], None] = lambda axis: None,
    ) -> None:
        if not 0 <= index < len(ranks):
            raise ValueError(f"axis {name!r}: index {index} of {len(ranks)} ranks")
        self.name, self.ranks, self.index = name, tuple(ranks), index
        self.calls: Counter[str] = Counter()
        """How many collectives of each kind ran."""
        self.elements: Counter[str] = Counter()
        """By kind, elements of the whole tensors that they were about; see :func:`elements_received`."""
        self.observer: Observer | None = None
        self.kept: dict[Any, Any] = {}
        """What functions over the axis make once for all their calls; it goes with the axis."""
        self._make = collectives
        self._collectives: Collectives | None = None
        self._look = look
        self._unfinished: dict[Started, Any] = {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, ranks={list(self.ranks)}, index={self.index})"

    def __deepcopy__(self, memo: Any) -> Axis:
        return self  # a copy of a layer talks to the same ranks

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's equal part of a tensor that all members hold; a view.

        Raises:
            ValueError: the size of that dimension is no multiple of the number of ranks.
        """
        return tensor.narrow(dim, self._extent(tensor, dim) * self.index, self._extent(tensor, dim))

    # Collectives ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum (or ``max``) over the members; the same bits on all of them."""
        if self.size == 1:
            return tensor
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if self._is_real(tensor):
            result.copy_(tensor)
            self._finish("all_reduce", self._now().all_reduce(result, op), result, result.numel())
        return result

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The members' tensors, all of one shape, one after another along ``dim``."""
        if self.size == 1:
            return tensor
        mine = tensor.contiguous()
        rows = mine.new_empty((self.size, *mine.shape))
        if self._is_real(tensor):
            self._finish("all_gather", self._now().all_gather(mine, rows), (mine, rows), rows.numel())
        return _rows_along(rows, dim % tensor.dim() if tensor.dim() else 0)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's equal part, along ``dim``, of the sum over the members.

        Raises:
            ValueError: the size of that dimension is no multiple of the number of ranks.
        """
        if self.size == 1:
            return tensor
        parts = self._along_rows(tensor, dim)
        mine = parts.new_empty(parts.shape[1:])
        if self._is_real(tensor):
            pending = self._now().reduce_scatter(parts, mine)
            self._finish("reduce_scatter", pending, (parts, mine), parts.numel())
        return mine

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Member ``root``'s tensor; on the others ``tensor`` gives its shape and dtype alone."""
        if self.size == 1:
            return tensor
        result = tensor.contiguous() if root == self.index else torch.empty_like(tensor).contiguous()
        if self._is_real(tensor):
            self._finish("broadcast", self._now().broadcast(result, root), result, result.numel(), root)
        return result

    def reduce(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
        """The sum over the members on member ``root``; None on the others."""
        if self.size == 1:
            return tensor
        work = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if self._is_real(tensor):
            work.copy_(tensor)
            self._finish("reduce", self._now().reduce(work, root), work, work.numel(), root)
        return work if root == self.index else None

    def all_to_all(self, tensor: torch.Tensor, split_dim: int, join_dim: int) -> torch.Tensor:
        """Splits along one dimension, gives member i the i-th part, and joins what came along another.

        Raises:
            ValueError: the size of ``split_dim`` is no multiple of the number of ranks.
        """
        if self.size == 1:
            return tensor
        sent = self._along_rows(tensor, split_dim)
        got = torch.empty_like(sent)
        if self._is_real(tensor):
            self._finish("all_to_all", self._now().all_to_all(sent, got), (sent, got), sent.numel())
        return _rows_along(got, join_dim % tensor.dim())

    def shift(self, tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
        """What the member ``by`` positions before holds, around the ring; all tensors have one shape."""
        if by % self.size == 0:
            return tensor
        mine = tensor.contiguous()
        got = torch.empty_like(mine)
        if self._is_real(tensor):
            to, source = (self.index + by) % self.size, (self.index - by) % self.size
            self._finish("shift", self._now().exchange(mine, to, got, source), (mine, got), mine.numel())
        return got

    # Started now, finished later ---------------------------------------------------------------------------

    def start_all_gather(self, mine: torch.Tensor, rows: torch.Tensor) -> Started:
        """In ``rows`` every member's ``mine``; both contiguous, and untouched until it is done."""
        return self._start("all_gather", self._now().all_gather(mine, rows), (mine, rows), rows.numel())

    def start_reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Started:
        """In ``mine`` the sum over the members of the rows of ``parts`` that are this member's."""
        return self._start(
            "reduce_scatter", self._now().reduce_scatter(parts, mine), (parts, mine), parts.numel()
        )

    # After a failure --------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Forgets collectives that will never end, because a member has failed; called by all members.

        Those that are queued on devices are aborted, so that what is queued behind them ends, and then their
        memory is free. The memory of others stays, since somebody may still write into it.
        """
        if isinstance(self._collectives, ByPlace):
            self._collectives.abort()
            for started in [each for each in self._unfinished if isinstance(each.pending, Queued)]:
                started.pending.done()
                del self._unfinished[started]
        self._collectives = None

    # What they share --------------------------------------------------------------------------------------

    def _is_real(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"

    def _now(self) -> Collectives:
        if self._collectives is None:
            if self._make is None:
                raise SMPError(
                    f"a layer is split over {self.size} ranks (axis {self.name!r}), and this is one process "
                    "without the others: start the script with smp-lite run or mpirun"
                )
            self._collectives = self._make()
        return self._collectives

    def _finish(
        self, kind: str, pending: Pending, memory: Any, num_elements: int, root: int | None = None
    ) -> None:
        started = self._start(kind, pending, memory, num_elements, root)
        if isinstance(pending, Queued):
            self._look(self)  # no wait will
        wait_until(started.done, started.waits_for, started.others)

    def _start(
        self, kind: str, pending: Pending, memory: Any, num_elements: int, root: int | None = None
    ) -> Started:
        self.calls[kind] += 1
        if root is None or (root == self.index) == (kind == "reduce"):
            self.elements[kind] += num_elements
        span = self.observer(kind, self, num_elements) if self.observer is not None else None
        started = Started(self, kind, num_elements, pending, span)
        self._unfinished[started] = memory
        return started

    def _extent(self, tensor: torch.Tensor, dim: int) -> int:
        total = tensor.shape[dim]
        if total % self.size:
            raise ValueError(
                f"dimension {dim} of a tensor of shape {list(tensor.shape)} cannot be split over the "
                f"{self.size} ranks of axis {self.name!r}: {total} is no multiple of {self.size}"
            )
        return total // self.size

    def _along_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Contiguous; row i is the part for member i."""
        extent, dim = self._extent(tensor, dim), dim % tensor.dim()
        return tensor.unflatten(dim, (self.size, extent)).movedim(dim, 0).contiguous()


class Started:
    """A collective under way. Until it has ended its memory stays, since MPI may write into it."""

    def __init__(
        self, axis: Axis, kind: str, num_elements: int, pending: Pending, span: Callable[[], None] | None
    ) -> None:
        self._axis, self._kind, self._num_elements = axis, kind, num_elements
        self.pending, self._span = pending, span

    def done(self) -> bool:
        """Polls.

        Raises:
            PeerFailed: a member has failed, so it will never end.
        """
        if not self.pending.done():
            self._axis._look(self._axis)
            return False
        if self._axis._unfinished.pop(self, None) is not None and self._span is not None:
            self._span()
        return True

    def waits_for(self) -> str:
        """For the error at the watchdog's limit."""
        ranks = self._axis.ranks
        return (
            f"rank {ranks[self._axis.index]}: {self._kind} of {self._num_elements} elements over axis "
            f"{self._axis.name!r}, ranks {list(ranks)}, has not ended: not all of them have called it"
        )

    def others(self) -> list[int]:
        """Those that may be missing."""
        return [rank for i, rank in enumerate(self._axis.ranks) if i != self._axis.index]


def _rows_along(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows one after another along a dimension of theirs."""
    if rows.dim() == 1 or dim == 0:
        return rows.flatten(0, 1) if rows.dim() > 1 else rows
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def elements_received(axis: Axis) -> dict[str, Fraction]:
    """Elements that this rank has received so far, by kind of collective.

    Counted by the lower bounds of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH" (2005), which ring and recursive algorithms reach, whatever the MPI at hand does: of
    n elements on p ranks an all-reduce brings each 2 (p - 1) / p n; an all-gather, a reduce-scatter and an
    all-to-all (p - 1) / p of the whole; a broadcast n to each but its root; a reduce (p - 1) n to its root.
    """
    p = axis.size
    share = Fraction(p - 1, p)
    factors = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "broadcast": Fraction(1),
        "reduce": Fraction(p - 1),
        "shift": Fraction(1),
    }
    return {kind: factors[kind] * n for kind, n in axis.elements.items()}
