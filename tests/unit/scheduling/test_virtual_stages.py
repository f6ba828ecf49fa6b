"""Several pieces of the line on each stage: the shapes, the balance against every possible split, groups."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.partitioning.balance import Group, Line, score
from smp_lite.plan.partitioning.partition import ModuleCost
from smp_lite.plan.partitioning.solver import TooFewModulesError, solve_partition
from smp_lite.plan.partitioning.split_moves import SplitLine, SplitState
from smp_lite.plan.partitioning.tree import stage_visits
from smp_lite.plan.partitioning.virtual_stages import balance_pieces, piece_stages, runs_of, step_cost

SHAPES: list[Any] = [2, 3, "v"]


def test_pieces_go_round_or_there_and_back() -> None:
    assert piece_stages(3, 1) == (0, 1, 2)
    assert piece_stages(3, 2) == (0, 1, 2, 0, 1, 2)
    assert piece_stages(3, "v") == (0, 1, 2, 2, 1, 0)
    assert runs_of(piece_stages(3, "v")) == [(0, 1), (1, 1), (2, 2), (1, 1), (0, 1)]
    for wrong in (0, True, 2.0, "V"):
        with pytest.raises(ValueError, match=r"virtual_stages is .*>= 1, or 'v'"):
            piece_stages(3, wrong)  # type: ignore[arg-type]


def _best(line: Line, num_stages: int, pieces: tuple[int, ...]) -> tuple[int, int, int]:
    """Largest stage, largest piece, bytes: of the split whose step is shortest."""
    runs = runs_of(pieces)
    found = []
    for cuts in combinations(range(1, len(line.costs)), len(runs) - 1):
        spans = list(pairwise([0, *cuts, len(line.costs)]))
        loads = [0] * num_stages
        for (stage, _), (start, end) in zip(runs, spans, strict=True):
            loads[stage] += sum(line.costs[start:end])
        largest = max(
            -(-sum(line.costs[start:end]) // size)
            for (_, size), (start, end) in zip(runs, spans, strict=True)
        )
        found.append((max(loads), largest, sum(line.entry_bytes[cut] for cut in cuts)))
    return min(found, key=lambda split: (step_cost(num_stages, *split[:2]), split[2]))


@settings(max_examples=60)
@given(st.data(), st.integers(2, 4), st.sampled_from(SHAPES))
def test_of_few_splits_the_best_is_found(data: st.DataObject, num_stages: int, shape: Any) -> None:
    pieces = piece_stages(num_stages, shape)
    num_atoms = len(runs_of(pieces)) + data.draw(st.integers(0, 2))
    numbers = st.lists(st.integers(1, 9), min_size=num_atoms, max_size=num_atoms)
    line = Line(tuple(data.draw(numbers)), tuple(data.draw(numbers)))
    stages, found = balance_pieces(line, num_stages, pieces)
    best = _best(line, num_stages, pieces)
    assert (found[0], step_cost(num_stages, *found[1:3]), found[3]) == (
        0,
        step_cost(num_stages, *best[:2]),
        best[2],
    )
    assert found[1] == score(line, stages, num_stages)[1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", [(1, 1), (3, 5), (9, 2)])
def test_of_many_splits_one_near_the_mean_is_found(shape: Any, ends: tuple[int, int]) -> None:
    """A model: blocks of one size between an embedding and a head."""
    pieces = piece_stages(4, shape)
    line = Line((ends[0], *[4] * 48, ends[1]), (1,) * 50)
    _, (missing, largest, piece, _, _) = balance_pieces(line, 4, pieces)
    mean = sum(line.costs) / 4
    assert missing == 0
    assert largest < mean + 4  # a block more, which cannot be shared out
    assert piece < mean / len(pieces) * 4 + 8


def test_pieces_are_even_rather_than_the_last_percent_of_stages() -> None:
    """Eight blocks between small ends: stages of 50.2 % with one tiny piece are no good."""
    line = Line((4, *[100] * 8, 20), (1,) * 10)
    stages, found = balance_pieces(line, 2, piece_stages(2, "v"))
    assert stages == (0, 0, 0, 1, 1, 1, 1, 0, 0, 0)
    assert found[1] / sum(line.costs) < 0.52


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_are_more_even_than_the_best_pieces_make_them(shape: Any) -> None:
    """The best split into pieces alone is at 1.05 to 1.1 of the mean here."""
    line = Line(tuple(1 + 37 * atom % 101 for atom in range(40)), (1,) * 40)
    pieces = piece_stages(4, shape)
    _, found = balance_pieces(line, 4, pieces)
    mean = sum(line.costs) / 4
    assert found[1] <= 1.045 * mean
    assert step_cost(4, *found[1:3]) <= 1.06 * (8 * mean + 3 * mean / (len(pieces) / 4))


def test_a_large_line_is_cut_near_its_mean() -> None:
    costs = tuple(1 + 37 * atom % 101 for atom in range(2_000))
    _, found = balance_pieces(Line(costs, (1,) * 2_000), 32, piece_stages(32, 2))
    assert found[1] <= 1.03 * sum(costs) / 32


def test_in_a_v_both_ends_are_on_one_stage_so_a_group_of_them_costs_nothing() -> None:
    line = Line((2,) * 8, (1,) * 8, (Group((0, 7), (0, 7)),))
    stages, found = balance_pieces(line, 2, piece_stages(2, "v"))
    assert stages == (0, 0, 1, 1, 1, 1, 0, 0)
    assert found == (0, 8, 4, 2, 128)


def test_round_robin_a_group_takes_one_seat() -> None:
    line = Line((2,) * 8, (1,) * 8, (Group((0, 7), (0, 7)),))
    stages, found = balance_pieces(line, 2, piece_stages(2, 2))
    assert stages[0] == stages[7]
    assert found[:2] == (0, 8)


def test_a_group_stays_apart_where_the_stage_comes_by_again() -> None:
    """Atoms 0 and 4 are the firsts of stage 0's two pieces."""
    line = Line((1,) * 8, (1,) * 8, (Group((0, 4), (0, 4)),))
    stages, _ = balance_pieces(line, 2, piece_stages(2, 2))
    assert stages == (0, 0, 1, 1, 0, 0, 1, 1)


def _leaf(name: str, order: int, **costs: Any) -> ModuleCost:
    return ModuleCost(name, (f"{name}.w",), 1, 4, 16, compute=1.0, order=order, **costs)


def _blocks(*, keep_whole: bool) -> ModuleCost:
    blocks = [
        ModuleCost(
            str(number),
            order=3 * number + 1,
            keep_whole=keep_whole,
            children=(_leaf(f"{number}.a", 3 * number + 2), _leaf(f"{number}.b", 3 * number + 3)),
        )
        for number in range(4)
    ]
    return ModuleCost("", order=0, children=tuple(blocks))


def test_blocks_are_opened_for_pieces_that_are_missing_and_only_then() -> None:
    root = _blocks(keep_whole=False)
    whole = solve_partition(root, 2, memory_weight=0.5, virtual_stages=2)
    assert [whole.stage_of[f"{i}.{part}"] for i in range(4) for part in "ab"] == [0, 0, 1, 1, 0, 0, 1, 1]
    opened = solve_partition(root, 2, memory_weight=0.5, virtual_stages=4)
    assert stage_visits(root, opened.stage_of) == (0, 1) * 4
    assert [opened.stage_of[str(i)] for i in range(4)] == [0] * 4  # a container's is the first of its stages


@pytest.mark.parametrize(("root", "found"), [(_blocks(keep_whole=True), 4), (ModuleCost(""), 0)])
def test_fewer_modules_than_pieces_is_an_error(root: ModuleCost, found: int) -> None:
    text = f"virtual_stages=3 with partitions=2 cuts the model into 6 pieces, but it has only {found} that"
    with pytest.raises(TooFewModulesError, match=text):
        solve_partition(root, 2, memory_weight=0.5, virtual_stages=3)


def test_pieces_that_are_no_intervals_are_refused_beside_it() -> None:
    with pytest.raises(ValueError, match=r"contiguous is False, and virtual_stages is 'v'"):
        solve_partition(_blocks(keep_whole=False), 2, memory_weight=0.5, contiguous=False, virtual_stages="v")


def test_one_stage_has_one_piece_whatever_is_asked() -> None:
    partition = solve_partition(_blocks(keep_whole=False), 1, memory_weight=0.5, virtual_stages=3)
    assert set(partition.stage_of.values()) == {0}


@pytest.mark.parametrize("seed", range(20))
def test_a_move_makes_what_the_split_after_it_is(seed: int) -> None:
    numbers = random.Random(seed)
    num_runs, num_stages = numbers.randint(2, 8), numbers.randint(2, 4)
    num_slots = numbers.randint(num_runs, 30)
    line = SplitLine(
        [0, *accumulate(numbers.randint(1, 50) for _ in range(num_slots))],
        [numbers.randint(1, 9) for _ in range(num_slots)],
        [[0, num_slots - 1], sorted(numbers.sample(range(num_slots), 2))],
        [(run % num_stages, numbers.randint(1, 2)) for run in range(num_runs)],
        num_stages,
    )
    state = SplitState([0, *sorted(numbers.sample(range(1, num_slots), num_runs - 1))], line)
    for move, figures in state.moves():
        assert figures == SplitState(state.moved(*move), line).figures
