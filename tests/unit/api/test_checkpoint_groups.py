"""SMP's strategies on a Sequential: which children are computed again together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_lite.plan.partitioning.checkpoint_groups import group_children, group_size

TABLE = [
    ("a0 b0 c1 d1", "a·b·c·d", "ab·cd", "ab·cd", "ab·cd"),
    ("a0 b0 c1 d1 e1", "a·b·c·d·e", "ab·cde", "ab·cd·e", "ab·cde"),
    ("a0 b0 c0 d0 e0", "a·b·c·d·e", "abcde", "ab·cd·e", "abc·de"),
    ("a0 b1 c0 d0", "a·b·c·d", "a·b·cd", "a·b·cd", "a·b·cd"),
    # Without a partition of its own a child goes with the one before.
    ("a0 b- c0 d1", "a·b·c·d", "abc·d", "ab·c·d", "abc·d"),
    ("a- b0 c- d1", "a·b·c·d", "abc·d", "ab·c·d", "abc·d"),
    ("a0 b0 c- d1", "a·b·c·d", "abc·d", "ab·c·d", "abc·d"),
    ("a- b-", "a·b", "ab", "ab", "ab"),
]
STRATEGIES = ("each", "contiguous", "group_2", "group_3")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_table(row: tuple[str, ...]) -> None:
    children, *expected = row
    names = [child[0] for child in children.split()]
    partitions = [None if child[1] == "-" else int(child[1]) for child in children.split()]
    for strategy, groups in zip(STRATEGIES, expected, strict=True):
        found = group_children(partitions, strategy)
        assert "·".join("".join(names[i] for i in group) for group in found) == groups, strategy


@given(st.lists(st.sampled_from([None, 0, 1, 2])), st.sampled_from([*STRATEGIES, "group_1", "group_100"]))
def test_groups_are_runs_of_one_partition(partitions: list[int | None], strategy: str) -> None:
    groups = group_children(partitions, strategy)
    assert [i for group in groups for i in group] == list(range(len(partitions)))
    most = group_size(strategy)
    for group in groups:
        assert most is None or len(group) <= most
        assert len({partitions[i] for i in group} - {None}) <= 1


@pytest.mark.parametrize("strategy", ["every", "group_0", "group_", "group_-1", "group_2x", 2, None])
def test_there_is_no_other_strategy(strategy: object) -> None:
    with pytest.raises(ValueError, match="must be 'each', 'contiguous' or 'group_n' with a number n"):
        group_size(strategy)
    with pytest.raises(ValueError, match="must be 'each'"):
        group_children([0], strategy)  # type: ignore[arg-type]
