"""The ranks of the job as gradient reduction sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .collectives import Collectives

__all__ = ["Ranks"]


class Ranks(NamedTuple):
    """Along which axes the ranks of one stage, over all replicas, differ.

    Attributes:
        batch_axes: those along which ranks have batches of their own.
        axes: all of them, each with its size.
        collectives: over the ranks along some of them; None where that is this rank alone.
    """

    batch_axes: tuple[str, ...]
    axes: dict[str, int]
    collectives: Callable[[Sequence[str]], Collectives | None]
