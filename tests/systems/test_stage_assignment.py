"""Layers to stages: the tables of the systems' own rules, and what the rules refuse."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.config import ConfigError
from smp_lite.systems.plan.stage_assignment import (
    StageRule,
    balanced_intervals,
    libai_counts,
    uniform_intervals,
)

LIBAI = {
    (4, 2): [2, 2],
    (5, 2): [2, 3],
    (6, 4): [1, 1, 2, 2],
    (7, 4): [1, 2, 2, 2],
    (8, 4): [2, 2, 3, 1],
    (9, 4): [2, 2, 2, 3],
    (10, 4): [2, 2, 3, 3],
    (12, 4): [3, 4, 4, 1],
    (12, 5): [2, 2, 2, 3, 3],
    (16, 4): [4, 5, 5, 2],
    (24, 4): [6, 7, 7, 4],
    (24, 2): [12, 12],
    (24, 3): [8, 8, 8],
    (24, 6): [4, 4, 5, 5, 5, 1],
    (24, 8): [3, 3, 3, 3, 3, 4, 4, 1],
    (32, 8): [4, 4, 4, 4, 5, 5, 5, 1],
    (40, 4): [10, 11, 11, 8],
    (48, 16): [3] * 13 + [4, 4, 1],
    (96, 8): [12, *[13] * 6, 6],
}


@pytest.mark.parametrize(("layers", "stages"), LIBAI)
def test_libais_automatic_rule(layers: int, stages: int) -> None:
    assert list(libai_counts(layers, stages)) == LIBAI[layers, stages]


@pytest.mark.parametrize(
    ("arguments", "intervals"),
    [
        ((10, 4, 1), [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]),
        ((8, 4, 2), [[(0, 1), (4, 5)], [(1, 2), (5, 6)], [(2, 3), (6, 7)], [(3, 4), (7, 8)]]),
        ((3, 4, 1), [[(0, 0)], [(0, 1)], [(1, 2)], [(2, 3)]]),
    ],
)
def test_uniform_split(arguments: tuple[int, int, int], intervals: list[list[tuple[int, int]]]) -> None:
    assert [list(chunks) for chunks in uniform_intervals(*arguments)] == intervals


def test_chunks_must_divide_the_layers() -> None:
    with pytest.raises(ConfigError, match=r"7 layers are not a multiple of num_model_chunks=2.*such as 1"):
        uniform_intervals(7, 2, 2)


@pytest.mark.parametrize(
    ("costs", "ranks", "chunks", "intervals"),
    [
        ([100, *[1] * 7], 4, 1, [[(0, 1)], [(1, 4)], [(4, 6)], [(6, 8)]]),
        (list(range(1, 9)), 3, 1, [[(0, 5)], [(5, 7)], [(7, 8)]]),
        ([4, 4, 4, 4, 8, 8, 1, 1], 2, 2, [[(0, 2), (4, 5)], [(2, 4), (5, 8)]]),
        ([0, 0, 10, 0, 10, 0], 2, 1, [[(0, 3)], [(3, 6)]]),
        ([1, 1, 1, 1], 3, 1, [[(0, 1)], [(1, 2)], [(2, 4)]]),
        ([5, 5], 2, 1, [[(0, 1)], [(1, 2)]]),
    ],
)
def test_split_balanced_by_parameters(
    costs: list[int], ranks: int, chunks: int, intervals: list[list[tuple[int, int]]]
) -> None:
    assert [list(found) for found in balanced_intervals(costs, ranks, chunks)] == intervals


@settings(max_examples=100)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 3))
def test_balanced_stages_cover_all_layers_in_order(costs: list[int], ranks: int, chunks: int) -> None:
    if len(costs) <= ranks * chunks and len(costs) % chunks:
        return
    by_rank = balanced_intervals(costs, ranks, chunks)
    in_turn = [by_rank[p][c] for c in range(chunks) for p in range(ranks)]
    assert in_turn[0][0] == 0 and in_turn[-1][1] == len(costs)
    assert all(first[1] == second[0] for first, second in pairwise(in_turn))
    if len(costs) > ranks * chunks:
        assert all(start < end for start, end in in_turn)
        # No contiguous split has a smaller largest stage than the one by bisection.
        weights = [cost or 1 for cost in costs]
        largest = max(sum(weights[start:end]) for start, end in in_turn)
        assert not _fits(weights, ranks * chunks, largest - 1)


def _fits(weights: list[int], stages: int, bound: int) -> bool:
    used, load = 1, 0
    for weight in weights:
        if weight > bound:
            return False
        if load + weight > bound:
            used, load = used + 1, 0
        load += weight
    return used <= stages


def test_virtual_stages_are_dealt_out_in_turn() -> None:
    rule = StageRule("uniform", (0, 1, 0, 1), num_chunks=2)
    assert rule.assign(8) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert [rule.owners[stage] for stage in rule.assign(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_this_librarys_partitioner_balances_costs() -> None:
    rule = StageRule("partitioner", (0, 1))
    assert rule.assign(4) == (0, 0, 1, 1)
    assert rule.assign(4, [9, 1, 1, 1]) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("rule", "layers", "costs", "message"),
    [
        (StageRule("uniform", (0, 1, 2, 3)), 3, None, "stage 0 would be empty: 3 layers over 4 stages"),
        (StageRule("balanced", (0, 1)), 4, None, "give their counts, or use partition_method='layer'"),
        (StageRule("libai", (0, 1, 2)), 2, None, "2 layers cannot fill 3 stages"),
        (StageRule("partitioner", (0, 1, 2)), 2, None, "2 layers cannot fill 3 stages"),
        (StageRule("libai", (0, 1), num_layers=6), 4, None, "is for 6 layers and the model has 4"),
        (StageRule("contexts", (0, 1), default_stage=0), 4, None, "smp.partition"),
        (StageRule("file", (0, 1), file="p.json"), 4, None, "stored in 'p.json'"),
        (StageRule("uniform", (0,)), 0, None, "must be an integer of 1 or more, got 0"),
        (StageRule("uniform", (0,)), True, None, "must be an integer of 1 or more, got True"),
        (StageRule("uniform", (0, 1)), 4, [1, 2], "2 costs for 4 layers"),
        (StageRule("balanced", (0, 1)), 2, [1, -2], "integers of 0 or more"),
    ],
)
def test_what_a_rule_cannot_place_is_refused(
    rule: StageRule, layers: int, costs: list[int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rule.assign(layers, costs)


def test_empty_stages_may_be_allowed() -> None:
    assert StageRule("uniform", (0, 1, 2, 3), allow_empty=True).assign(3) == (1, 2, 3)
