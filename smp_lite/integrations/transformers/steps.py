"""One batch of the Trainer is one step of the library, over microbatches that were cut beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...devices import CPU
from ...record.values.microbatch import Splitter, StepOutput
from ...steps.step_function import StepFunction
from .rows import Rows, repeated, rows_of

__all__ = ["Piece", "per_piece", "pieces_of", "step_over_pieces"]


class Piece(NamedTuple):
    """A microbatch, as the step functions get it.

    Numbers that differ from batch to batch are tensors, so that what is recorded of a step stays the same.

    Attributes:
        inputs: its rows.
        num_items: ``num_items_in_batch`` of the whole batch, or None.
        weight: what its loss counts in the batch's; None: it is the batch.
        divisor: of the loss, where gradients are accumulated over several batches; or None.
    """

    inputs: Any
    num_items: Any
    weight: torch.Tensor | None
    divisor: torch.Tensor | None


def pieces_of(
    inputs: Any,
    num_rows: int,
    cuts: list[Rows],
    num_items: Any,
    weights: list[float] | None = None,
    divisor: float | None = None,
    filler: int = 0,
) -> list[Piece]:
    """The microbatches of a step.

    Args:
        inputs: the whole batch.
        num_rows: of it.
        cuts: this replica's.
        num_items: see :class:`Piece`.
        weights: of the cuts' losses; None: each counts for itself.
        divisor: see :class:`Piece`.
        filler: the row that is computed where there is none, or where the loss of those there are may be
        none.
    """
    pieces = []
    for i, rows in enumerate(cuts):
        weight = None if weights is None else weights[i]
        if rows == Rows(0, num_rows):
            part = inputs
        elif rows.count == 0 or weight == 0.0:
            part = repeated(inputs, filler, max(rows.count, 1), num_rows)
        else:
            part = rows_of(inputs, rows, num_rows)
        pieces.append(
            Piece(
                part,
                num_items,
                None if weight in (None, 1.0) else torch.tensor(weight, dtype=torch.float64, device=CPU),
                None if divisor is None else torch.tensor(float(divisor), dtype=torch.float64, device=CPU),
            )
        )
    return pieces


class _OneForEach(Splitter):
    """Does not cut: each microbatch gets one item of the step's only argument."""

    def split(
        self, bound: inspect.BoundArguments, num_microbatches: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        (pieces,) = bound.arguments.values()
        return [((piece,), {}) for piece in pieces]


def step_over_pieces(function: Callable[[Piece], Any]) -> StepFunction:
    """A step function of a list of pieces, in any number."""
    return StepFunction(function, splitter=_OneForEach(function))


def per_piece(result: Any, number: int) -> list[Any]:
    """What a step returned, apart by microbatch again.

    Structures that differ between microbatches come as a list of them from the library.
    """
    if isinstance(result, StepOutput):
        return list(result.outputs)
    if isinstance(result, tuple):
        parts = [per_piece(item, number) for item in result]
        kind = type(result)
        return [
            kind(*items) if hasattr(result, "_fields") else kind(items) for items in zip(*parts, strict=True)
        ] or [kind()] * number
    if isinstance(result, dict):
        parts = {key: per_piece(item, number) for key, item in result.items()}
        return [{key: items[m] for key, items in parts.items()} for m in range(number)]
    if isinstance(result, list):
        return result if len(result) == number else [result] * number
    return [result] * number
