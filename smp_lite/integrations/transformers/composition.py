"""How the loss of a batch comes from the losses of its rows.

A microbatch knows its own rows only, so the loss of the batch has to be put together, and that depends on the
model: a sum over tokens, divided by the batch's number of them (``num_items_in_batch``); a mean over labels
that are not -100; a mean over rows. What a model's forward does with ``num_items_in_batch`` cannot be seen
from its signature (BERT's classifier takes it and ignores it). So it is tried: the loss of two rows together
against the losses of each. A loss that is none of these (contrastive, with an auxiliary loss over the batch,
with weights of classes) is refused by name, never approximated. Rows of one class cannot tell weights of
classes, so each class that is new is tried against one that is known. Two rows cannot tell everything: a
vocabulary with weights, the hardest of many tokens, a term that begins after a while. So two neighbouring
cuts are tried as well, of the first batches and then now and then. With one microbatch and one replica
nothing is put together, and any loss goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import SMPError
from ...steps.step_context import CHECK_EVERY_STEPS, FIRST_CHECKED_STEPS
from .rows import Rows

__all__ = ["Composition"]

KINDS = ("scaled", "labels", "rows")
"""A sum divided by what is given; a mean over labels; a mean over rows."""

TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2


class Composition:
    """What is known of a model's loss by now.

    Args:
        label_count: of a batch, for each row how many labels its loss is over; None where that is unknown.
        label_values: of a batch, for each row which classes its labels are; None where they are no classes.
        losses: of a batch's rows, the loss of each of these sets of rows, evaluated (see :meth:`_try`).
        is_half: whether the model computes in half precision.
    """

    def __init__(
        self,
        label_count: Callable[[Any], list[int] | None],
        label_values: Callable[[Any], list[frozenset[int]] | None],
        losses: Callable[[Any, list[Rows], Any], list[float]],
        is_half: bool,
    ) -> None:
        self._label_count = label_count
        self._label_values = label_values
        self._losses = losses
        self._tolerance = HALF_TOLERANCE if is_half else TOLERANCE
        # Once with num_items_in_batch, once without: a model may do two things.
        self._possible = {True: KINDS, False: KINDS[1:]}
        self._tried: set[bool] = set()
        self._known: dict[bool, list[set[int]]] = {True: [], False: []}
        self._batches = {True: 0, False: 0}

    def weights(self, inputs: Any, num_rows: int, num_items: Any, cuts: Sequence[Rows]) -> list[float]:
        """What the loss of each cut counts in the batch's; what counts nothing may be no number.

        Raises:
            SMPError: the model's loss is not made of the losses of rows.
        """
        if len(cuts) == 1:
            return [1.0]
        counts = self._label_count(inputs)
        is_given = num_items is not None
        has_labels = counts is not None and sum(counts) > 0
        kinds = [kind for kind in self._possible[is_given] if kind != "labels" or has_labels]
        if not kinds:  # A mean over no label at all, which is no number in one process either.
            kinds = ["rows"]
        found = [_weights(kind, counts, num_rows, cuts) for kind in kinds]
        pairs = self._new_pairs(inputs, is_given)
        if is_given not in self._tried or any(weights != found[0] for weights in found[1:]):
            pairs.insert(0, _telling_rows(counts, num_rows))
        for row, other in pairs:
            both = [Rows(row, row + 1), Rows(other, other + 1)]
            kinds = list(self._try(inputs, both, num_items, counts, kinds))
        self._possible[is_given] = tuple(kinds)
        self._tried.add(is_given)
        if pairs:
            found = [_weights(kind, counts, num_rows, cuts) for kind in kinds]
        self._try_neighbours(inputs, num_items, counts, kinds, cuts)
        return found[0]

    def _try_neighbours(
        self, inputs: Any, num_items: Any, counts: list[int] | None, kinds: list[str], cuts: Sequence[Rows]
    ) -> None:
        """Two cuts together, other ones each time."""
        number = self._batches[num_items is not None]
        self._batches[num_items is not None] += 1
        if number >= FIRST_CHECKED_STEPS and number % CHECK_EVERY_STEPS:
            return
        first = (2 * number) % (len(cuts) - 1)
        neighbours = list(cuts[first : first + 2])
        kinds = [kind for kind in kinds if kind != "labels" or sum(_of(counts, neighbours) or ())]
        if kinds:  # Else a mean over nothing.
            self._try(inputs, neighbours, num_items, counts, kinds)

    def _new_pairs(self, inputs: Any, is_given: bool) -> list[tuple[int, int]]:
        """Rows with classes that were not in rows tried together yet."""
        values = self._label_values(inputs)
        rows = [row for row, own in enumerate(values or ()) if own]
        pairs = []
        known = self._known[is_given]
        for row in rows[1:]:
            together = set(values[rows[0]] | values[row])  # type: ignore[index]
            if len(together) == 1 or any(together <= group for group in known):
                continue
            touched = [group for group in known if group & together]
            known[:] = [group for group in known if group not in touched] + [together.union(*touched)]
            pairs.append((rows[0], row))
        return pairs

    def _try(
        self,
        inputs: Any,
        both: list[Rows],
        num_items: Any,
        counts: list[int] | None,
        kinds: list[str],
    ) -> tuple[str, ...]:
        """Those of the kinds that two sets of rows of this batch do not tell from each other."""
        whole, *parts = self._losses(inputs, both, num_items)
        sizes = [rows.count for rows in both]
        at = [Rows(0, sizes[0]), Rows(sizes[0], sum(sizes))]
        own = [_weights(kind, _of(counts, both), sum(sizes), at) for kind in kinds]
        terms = [[w * loss for w, loss in zip(weights, parts) if w] for weights in own]
        if not math.isfinite(whole) and all(not math.isfinite(sum(of_kind)) for of_kind in terms):
            return tuple(kinds)  # Training went wrong, which says nothing of how a loss is made.
        errors = [abs(sum(of_kind) - whole) for of_kind in terms]
        errors = [math.inf if math.isnan(error) else error for error in errors]
        best = min(range(len(kinds)), key=errors.__getitem__)
        if not errors[best] <= self._tolerance * max(abs(whole), *map(abs, terms[best]), 1e-6):
            many = "two rows" if sizes == [1, 1] else f"{sizes[0]} and {sizes[1]} rows together"
            raise SMPError(
                f"the loss of this model over {many} of a batch is {whole:g}, and of each {parts[0]:g} and "
                f"{parts[1]:g}: it is neither their sum over num_items_in_batch nor a mean over labels or "
                "rows, so the loss of a batch cannot be put together from microbatches and replicas: use "
                '"microbatches": 1 and one replica, or give the Trainer a compute_loss_func that divides a '
                "sum by num_items_in_batch"
            )
        return tuple(kind for kind, weights in zip(kinds, own) if weights == own[best])


def _telling_rows(counts: list[int] | None, num_rows: int) -> tuple[int, int]:
    """Two rows that differ in their number of labels, if there are such."""
    if counts is not None and len(set(counts)) > 1:
        few, many = counts.index(min(counts)), counts.index(max(counts))
        return min(few, many), max(few, many)
    return 0, num_rows - 1


def _of(counts: list[int] | None, both: list[Rows]) -> list[int] | None:
    return None if counts is None else [n for rows in both for n in counts[rows.start : rows.end]]


def _weights(kind: str, counts: list[int] | None, num_rows: int, cuts: Sequence[Rows]) -> list[float]:
    if kind == "scaled":
        return [1.0] * len(cuts)
    if kind == "rows":
        return [rows.count / num_rows for rows in cuts]
    assert counts is not None
    return [sum(counts[rows.start : rows.end]) / sum(counts) for rows in cuts]


MANY_CLASSES = 100
"""Labels of tokens above this are a vocabulary, of which each batch has some that are new."""


def _targets(labels: Any, shifts: bool) -> Any:
    """What of labels are targets; None where labels are no class numbers."""
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    return labels[..., 1:] if shifts and labels.dim() > 1 else labels


def label_values(labels: Any, shifts: bool) -> list[frozenset[int]] | None:
    """For each row the classes of its labels; None where labels are no class numbers, or tokens of text.

    Args:
        labels: of a batch.
        shifts: as of :func:`count_labels`.
    """
    targets = _targets(labels, shifts)
    if targets is None or (targets.dim() > 1 and targets.numel() and targets.max() >= MANY_CLASSES):
        return None
    return [frozenset(row) - {-100} for row in targets.reshape(len(targets), -1).tolist()]


def count_labels(labels: Any, shifts: bool) -> list[int] | None:
    """For each row how many labels are not -100; None where labels are no class numbers.

    Args:
        labels: of a batch.
        shifts: whether the first label of each row is no target, as in causal language models.
    """
    targets = _targets(labels, shifts)
    if targets is None:
        return None
    return targets.ne(-100).reshape(len(labels), -1).sum(1).tolist()
