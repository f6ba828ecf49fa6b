"""Steps of a distributed model and, alternating with them, of the same model in one process; their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import smp_lite as smp
from tests.benchmarks.measuring import on_first_rank, timed

__all__ = [
    "WARM_UP_STEPS",
    "BesideDense",
    "RankMemory",
    "alternate",
    "largest_difference",
    "relative_difference",
    "step_of",
]

WARM_UP_STEPS = 4
"""More than those in which the ranks compare what they have alike."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process: what it holds between two steps, and the peak of one."""

    held: int
    peak: int


@dataclass(frozen=True)
class BesideDense(RankMemory):
    """What one rank measured: seconds and losses of each step; the dense model's of rank 0 alone."""

    own_s: list[float]
    dense_s: list[float]
    losses: list[float]
    dense_losses: list[float]


def step_of(
    model: Any, optimizer: Any, batch: Sequence[Tensor], loss_of: Callable[..., Tensor]
) -> Callable[[], float]:
    """A training step that returns this rank's loss.

    Args:
        model: distributed.
        optimizer: its own.
        batch: of this rank.
        loss_of: ``loss_of(model, *batch)``.
    """

    @smp.step
    def forward_backward(*given: Tensor) -> Tensor:
        loss = loss_of(model, *given)
        model.backward(loss)
        return loss

    def step() -> float:
        optimizer.zero_grad()
        loss = forward_backward(*batch).reduce_mean()
        optimizer.step()
        return float(loss)

    return step


def alternate(
    step: Callable[[], float], dense: Callable[[], float], losses: list[float], num_pairs: int
) -> dict[str, list[float]]:
    """Pairs of a dense step, on rank 0 alone, and one of all ranks.

    Args:
        step: of all ranks.
        dense: the same in one process.
        losses: of the steps before, which dense steps make up for first.
        num_pairs: how many.

    Returns:
        The fields of :class:`BesideDense` beside the bytes.
    """
    losses, dense_losses = list(losses), []
    own_s: list[float] = []
    dense_s: list[float] = []
    if smp.rank() == 0:
        dense_losses += [dense() for _ in losses]
    for _ in range(num_pairs):
        dense_s.append(on_first_rank(lambda: dense_losses.append(dense())))
        own_s.append(timed(lambda: losses.append(step())))
    return {"own_s": own_s, "dense_s": dense_s, "losses": losses, "dense_losses": dense_losses}


def largest_difference(ranks: Sequence[BesideDense]) -> float:
    """Of losses, relative: the mean of all ranks', step by step, against the dense model's."""
    return relative_difference((rank.losses for rank in ranks), ranks[0].dense_losses)


def relative_difference(of_ranks: Iterable[Sequence[float]], wanted: Sequence[float]) -> float:
    """The largest, of means over ranks against what is wanted."""
    means = [sum(losses) / len(losses) for losses in zip(*of_ranks, strict=True)]
    return max(abs(mean - loss) / abs(loss) for mean, loss in zip(means, wanted, strict=True))
