"""Medians with their quartiles: what a table shows of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Spread", "slowest_rank"]


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements and the two values that half of them lie between."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles of at least two values."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)

    def text(self, unit: float = 1.0, digits: int = 1) -> str:
        """``median (lower..upper)`` in multiples of `unit`."""
        median, lower, upper = (
            f"{value / unit:.{digits}f}" for value in (self.median, self.lower, self.upper)
        )
        return f"{median} ({lower}..{upper})"


def slowest_rank(times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """A step takes as long as its slowest rank: the maximum over ranks, step by step."""
    return [max(times) for times in zip(*times_by_rank, strict=True)]
