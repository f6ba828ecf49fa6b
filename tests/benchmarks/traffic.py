"""Counts what collectives bring to a rank: those of layers, and those of the reduction of gradients.

By lower bounds of what any algorithm must bring (:func:`~smp_lite.comm.groups.axis.elements_received`).
Messages of a few bytes that are no collectives (agreements between ranks) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from smp_lite.comm.collectives import Collectives, Pending
from smp_lite.comm.groups.axis import Axis, elements_received
from smp_lite.session import Session

__all__ = ["Traffic"]


class Traffic:
    """Of one rank, from when it is made on. Make it before the model.

    Args:
        session: of the job.
        element_size: bytes of what layers send.
    """

    def __init__(self, session: Session, element_size: int) -> None:
        self._session, self._element_size = session, element_size
        self._axes: set[Axis] = set()
        self._ledgers: list[Axis] = []
        self._of_gradients = session._collectives
        session._collectives = self._counted  # type: ignore[method-assign]
        if session.stage_peers is not None:
            session.stage_peers.observe(lambda kind, axis, num_elements: self._axes.add(axis))

    def layers(self) -> int:
        """Bytes that have come by collectives over axes: parts of activations, of their gradients, and
        sharded parameters."""
        return _total(self._axes) * self._element_size

    def gradients(self) -> int:
        """Bytes that have come when gradients of parameters were summed."""
        return _total(self._ledgers)

    def _counted(self, axes: Sequence[str], *, own: bool = False) -> Collectives | None:
        collectives = self._of_gradients(axes, own=own)
        if collectives is None:
            return None
        session = self._session
        assert session.world is not None
        # An axis of the same ranks, over which nothing is sent: it knows how to count.
        name = "+".join(axes)
        ledger = Axis(name, session.world.group(name), session.world.group_rank(name))
        self._ledgers.append(ledger)
        return _Counted(collectives, ledger)


class _Counted:
    """Collectives that note, in the elements of an axis, the bytes that they are about."""

    def __init__(self, inner: Collectives, ledger: Axis) -> None:
        self._inner, self._ledger = inner, ledger
        self.size = inner.size

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        self._note("all_reduce", tensor)
        return self._inner.all_reduce(tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        if root == self._ledger.index:
            self._note("reduce", tensor)
        return self._inner.reduce(tensor, root)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        if root != self._ledger.index:
            self._note("broadcast", tensor)
        return self._inner.broadcast(tensor, root)

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        self._note("all_gather", all_of_them)
        return self._inner.all_gather(mine, all_of_them)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        self._note("reduce_scatter", parts)
        return self._inner.reduce_scatter(parts, mine)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        self._note("all_to_all", sent)
        return self._inner.all_to_all(sent, got)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        self._note("shift", got)
        return self._inner.exchange(sent, dest, got, source)

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        self._ledger.elements[kind] += tensor.numel() * tensor.element_size()


def _total(axes: set[Axis] | list[Axis]) -> int:
    total = sum((sum(elements_received(axis).values(), Fraction(0)) for axis in axes), Fraction(0))
    return round(total)
