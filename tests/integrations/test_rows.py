"""Which rows of a batch go where, and what their losses count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_lite.errors import SMPError
from smp_lite.integrations.transformers.composition import Composition, count_labels, label_values
from smp_lite.integrations.transformers.rows import Rows, cut, join, repeated, rows_of


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(1, 8))
def test_each_row_is_in_one_cut_and_replicas_run_alike(
    num_rows: int, replicas: int, microbatches: int, per_replica: int
) -> None:
    cuts = cut(num_rows, replicas, microbatches, per_replica)
    covered = sorted(row for own in cuts for rows in own for row in range(rows.start, rows.end))
    assert covered == list(range(num_rows))
    assert len({tuple(max(rows.count, 1) for rows in own) for own in cuts}) == 1
    if num_rows == replicas * per_replica:
        assert all(len(own) <= microbatches for own in cuts)


def test_outputs_come_in_the_order_of_the_batch() -> None:
    batch = torch.arange(13)
    parts = [
        (rows, {"x": (rows_of(batch, rows, 13),)}) for own in cut(13, 3, 2, 5) for rows in own if rows.count
    ]
    assert join(parts)["x"][0].tolist() == list(range(13))
    assert repeated({"x": batch}, 4, 3, 13)["x"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("inputs", [{"a": {"b": torch.ones(3, 2)}}, {"a": ["x"] * 3}])
def test_what_has_other_rows_is_named(inputs: Any) -> None:
    with pytest.raises(SMPError, match="inputs\\['a'\\]"):
        rows_of(inputs, Rows(0, 1), 4)


def no_classes(labels: Any) -> None:
    return None


LABELS = torch.tensor([[1, 1, 1, 1], [1, -100, -100, -100], [2, 2, -100, -100], [-100] * 4])
VALUES = torch.tensor([1.0, 5.0, 3.0, 9.0])
"""The loss of each label of a row."""


def losses(kind: str) -> Any:
    """Of a made-up model."""

    def over(rows: list[int], num_items: Any) -> float:
        counts = LABELS.ne(-100).sum(1)[rows]
        if kind == "scaled":
            return float((counts * VALUES[rows]).sum() / num_items)
        if kind == "labels":
            return float((counts * VALUES[rows]).sum() / counts.sum())
        if kind == "rows":
            return float(VALUES[rows].mean())
        return float(VALUES[rows].prod())

    return of_sets(over), over


def of_sets(over: Callable[[list[int], Any], float]) -> Callable[[Any, list[Rows], Any], list[float]]:
    """What a composition asks for: the loss of two sets of rows together, and of each."""

    def of(inputs: Any, both: list[Rows], num_items: Any) -> list[float]:
        sets = [list(range(*rows)) for rows in both]
        return [over(sets[0] + sets[1], num_items), *(over(own, num_items) for own in sets)]

    return of


@pytest.mark.parametrize("kind", ["scaled", "labels", "rows"])
def test_weights_make_the_loss_of_the_batch(kind: str) -> None:
    of, over = losses(kind)
    composition = Composition(
        lambda labels: count_labels(labels, False), lambda labels: None, of, is_half=False
    )
    for cuts in ([Rows(0, 2), Rows(2, 4)], [Rows(0, 1), Rows(1, 4)], [Rows(0, 3), Rows(3, 4)]):
        weights = composition.weights(LABELS, 4, 7, cuts)
        parts = [over(list(range(*rows)), 7) for rows in cuts]
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
        assert total == pytest.approx(over([0, 1, 2, 3], 7))


def test_another_loss_is_refused_also_where_all_weights_would_be_the_same() -> None:
    of, _ = losses("product")
    composition = Composition(lambda labels: [1, 1, 1, 1], no_classes, of, is_half=False)
    with pytest.raises(SMPError, match="the loss of this model over two rows"):
        composition.weights(LABELS, 4, None, [Rows(0, 2), Rows(2, 4)])


def weighted(classes: list[float]) -> Any:
    """A mean by weights of classes; of each row there is one label."""

    def of(labels: torch.Tensor, both: list[Rows], num_items: Any) -> list[float]:
        values = torch.tensor([1.0, 2.0, 4.0, 8.0])
        weights = torch.tensor(classes)[labels]

        def over(own: list[int], num_items: Any) -> float:
            return float((weights[own] * values[own]).sum() / weights[own].sum())

        return of_sets(over)(labels, both, num_items)

    return of


def test_weights_of_classes_are_refused_in_the_first_batch_that_has_both() -> None:
    cuts = [Rows(0, 2), Rows(2, 4)]

    def composition(classes: list[float]) -> Composition:
        return Composition(
            lambda labels: count_labels(labels, False),
            lambda labels: label_values(labels, False),
            weighted(classes),
            is_half=False,
        )

    batches = [[0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 2, 1]]
    own = composition([1.0, 1.0, 5.0])
    for batch in batches[:2]:
        assert own.weights(torch.tensor(batch), 4, None, cuts) == [0.5, 0.5]
    with pytest.raises(SMPError, match="the loss of this model over two rows"):
        own.weights(torch.tensor(batches[2]), 4, None, cuts)
    alike = composition([2.0, 2.0, 2.0])
    for batch in batches:
        assert alike.weights(torch.tensor(batch), 4, None, cuts) == [0.5, 0.5]


ROWS = torch.tensor([1.0, 2.0, 4.0, 8.0])
IMPORTANCE = torch.tensor([1.0, 1.0, 5.0, 1.0])

NOT_OF_TWO_ROWS: dict[str, Callable[[list[int]], torch.Tensor]] = {
    "the hardest two": lambda own: ROWS[own].topk(min(2, len(own))).values.mean(),
    "a row in the middle counts more": lambda own: (
        (ROWS[own] * IMPORTANCE[own]).sum() / IMPORTANCE[own].sum()
    ),
    "the largest": lambda own: ROWS[own].mean() + (ROWS[own].max() if len(own) > 2 else 0.0),
}


@pytest.mark.parametrize("kind", NOT_OF_TWO_ROWS)
def test_cuts_tell_what_two_rows_do_not(kind: str) -> None:
    over = NOT_OF_TWO_ROWS[kind]
    of = of_sets(lambda own, num_items: float(over(own)))
    composition = Composition(lambda labels: None, no_classes, of, is_half=False)
    with pytest.raises(SMPError, match="the loss of this model over 2 and 2 rows together of a batch is"):
        composition.weights(LABELS, 4, None, [Rows(0, 2), Rows(2, 4)])


def test_a_term_that_begins_later_is_found_now_and_then() -> None:
    begun = False

    def over(own: list[int], num_items: Any) -> float:
        return float(ROWS[own].mean() + (ROWS[own].max() if begun else 0.0))

    composition = Composition(lambda labels: None, no_classes, of_sets(over), is_half=False)
    cuts = [Rows(0, 2), Rows(2, 4)]
    for batch in range(100):
        begun = batch > 3
        composition.weights(LABELS, 4, None, cuts)
    with pytest.raises(SMPError, match="the loss of this model over 2 and 2 rows together"):
        composition.weights(LABELS, 4, None, cuts)


def test_losses_that_are_no_numbers_say_nothing() -> None:
    of = of_sets(lambda own, num_items: math.nan)
    composition = Composition(lambda labels: None, no_classes, of, is_half=False)
    assert composition.weights(LABELS, 4, None, [Rows(0, 2), Rows(2, 4)]) == [0.5, 0.5]


def test_classes_of_rows() -> None:
    assert label_values(LABELS, False) == [{1}, {1}, {2}, set()]
    assert label_values(torch.tensor([3, 500]), False) == [{3}, {500}]
    assert label_values(torch.tensor([[3, 500]]), False) is None
    assert label_values(torch.ones(3), False) is None


def test_labels_are_counted_where_they_are_targets() -> None:
    assert count_labels(LABELS, False) == [4, 1, 2, 0]
    assert count_labels(LABELS, True) == [3, 0, 1, 0]
    assert count_labels(torch.tensor([1, 2, -100]), True) == [1, 1, 0]
    assert count_labels(torch.ones(3), False) is None
