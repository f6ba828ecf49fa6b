"""The ranks of the job as gradient reduction sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..collectives import Collectives

__all__ = ["Ranks"]


class _MakesCollectives(Protocol):
    def __call__(self, axes: Sequence[str], *, own: bool = False) -> Collectives | None: ...


class Ranks(NamedTuple):
    """Along which axes the ranks of one stage, over all replicas, differ.

    Attributes:
        batch_axes: those along which ranks have batches of their own.
        axes: all of them, each with its size.
        collectives: over the ranks along some of them (``own=True``: that nobody else uses); None where
            that is this rank alone.
        members: numbers in the job of those same ranks, for errors.
    """

    batch_axes: tuple[str, ...]
    axes: dict[str, int]
    collectives: _MakesCollectives
    members: Callable[[Sequence[str]], tuple[int, ...]] = lambda axes: ()
