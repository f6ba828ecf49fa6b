"""The balancing of a line of atoms, against enumeration of everything that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.partitioning.balance import Group, Line, balance, score, seatings, spread
from smp_lite.plan.partitioning.local_search import Scattered

costs = st.integers(0, 12)
nbytes = st.integers(0, 3)


def lines(min_size: int = 1, max_size: int = 8) -> st.SearchStrategy[Line]:
    atoms = st.lists(st.tuples(costs, nbytes), min_size=min_size, max_size=max_size)
    return atoms.map(lambda pairs: Line(*map(tuple, zip(*pairs))))


@st.composite
def grouped_lines(draw: st.DrawFn) -> Line:
    line = draw(lines(min_size=2, max_size=7))
    shuffled = draw(st.permutations(range(len(line.costs))))
    first = draw(st.integers(2, len(shuffled)))
    second = draw(st.integers(0, len(shuffled) - first))
    groups = []
    for atoms in (shuffled[:first], shuffled[first : first + second]):
        if len(atoms) > 1:
            atoms = tuple(sorted(atoms))
            groups.append(Group(atoms, draw(st.sampled_from([atoms, atoms[:1]]))))
    return Line(line.costs, line.entry_bytes, tuple(groups))


def _splits(num_items: int, num_stages: int) -> Iterator[list[int]]:
    """All contiguous assignments that leave no stage empty without need."""
    num_parts = min(num_stages, num_items)
    for cuts in combinations(range(1, num_items), num_parts - 1):
        yield [sum(item >= cut for cut in cuts) for item in range(num_items)]


def _seated_splits(line: Line, num_stages: int) -> Iterator[list[int]]:
    """The same, each group at each of its seats."""
    for seats in product(*(group.seats for group in line.groups)):
        seat_of = {a: s for group, s in zip(line.groups, seats) for a in group.atoms}
        places = [seat_of.get(atom, atom) for atom in range(len(line.costs))]
        slots = sorted(set(places))
        for stages in _splits(len(slots), num_stages):
            yield [stages[slots.index(place)] for place in places]


def _assignments(line: Line, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All assignments, contiguous or not, that leave no stage empty without need."""
    num_used = min(num_stages, len(line.costs))
    for stages in product(range(num_stages), repeat=len(line.costs)):
        if len(set(stages)) == num_used:
            yield stages


@pytest.mark.slow
@settings(max_examples=300)
@given(lines(), st.integers(1, 5))
def test_contiguous_equals_the_enumerated_optimum(line: Line, num_stages: int) -> None:
    stages = balance(line, num_stages)
    best = min(score(line, split, num_stages) for split in _splits(len(line.costs), num_stages))
    assert list(stages) == sorted(stages)
    assert score(line, stages, num_stages) == best


@pytest.mark.slow
@settings(max_examples=300)
@given(grouped_lines(), st.integers(1, 4))
def test_groups_take_their_best_seats(line: Line, num_stages: int) -> None:
    stages = balance(line, num_stages)
    best = min(score(line, split, num_stages)[:2] for split in _seated_splits(line, num_stages))
    assert score(line, stages, num_stages)[:2] == best
    for group in line.groups:
        assert len({stages[atom] for atom in group.atoms}) == 1


@settings(max_examples=150)
@given(lines(max_size=6), st.integers(1, 4))
def test_scattered_equals_the_enumerated_optimum_or_stays_contiguous(line: Line, num_stages: int) -> None:
    contiguous = balance(line, num_stages)
    stages = balance(line, num_stages, contiguous=False)
    best = min(score(line, each, num_stages) for each in _assignments(line, num_stages))
    if best[:2] < score(line, contiguous, num_stages)[:2]:
        assert score(line, stages, num_stages) == best
        assert stages[0] == 0
    else:
        assert stages == contiguous


@pytest.mark.slow
@settings(max_examples=100)
@given(grouped_lines(), st.integers(1, 4))
def test_scattered_keeps_groups_and_never_loses(line: Line, num_stages: int) -> None:
    stages = balance(line, num_stages, contiguous=False)
    assert score(line, stages, num_stages)[:2] <= score(line, balance(line, num_stages), num_stages)[:2]
    for group in line.groups:
        assert len({stages[atom] for atom in group.atoms}) == 1


@settings(max_examples=60)
@given(lines(min_size=13, max_size=30), st.integers(2, 6))
def test_scattered_by_local_search_never_loses(line: Line, num_stages: int) -> None:
    contiguous = score(line, balance(line, num_stages), num_stages)
    stages = balance(line, num_stages, contiguous=False)
    assert score(line, stages, num_stages)[:2] <= contiguous[:2]
    assert list(dict.fromkeys(stages)) == list(range(num_stages))


def test_local_search_evens_out_an_alternating_line() -> None:
    line = Line(costs=(6, 1) * 7, entry_bytes=(1,) * 14)
    assert score(line, balance(line, 2), 2)[1] == 27
    assert score(line, balance(line, 2, contiguous=False), 2)[1] == 25


def test_local_search_swaps_where_no_move_helps() -> None:
    line = Line(costs=(5, 8, 6, 3, 8, 8, 3, 1, 5, 1, 6, 7, 1), entry_bytes=(1,) * 13)
    assert score(line, balance(line, 3), 3)[1] == 22
    assert score(line, balance(line, 3, contiguous=False), 3)[1] == 21


def test_a_few_atoms_are_searched_exactly() -> None:
    """Moves and swaps alone stop at 21 here."""
    line = Line(costs=(13, 6, 5, 1, 11, 3, 19, 2), entry_bytes=(1,) * 8)
    assert score(line, balance(line, 3), 3)[1] == 21
    assert score(line, balance(line, 3, contiguous=False), 3)[1] == 20


@settings(max_examples=100)
@given(grouped_lines() | lines(min_size=6, max_size=14), st.data())
def test_each_step_of_local_search_is_the_best_of_all(line: Line, data: st.DataObject) -> None:
    """Of all moves and swaps that take load off the largest stage, looked at one by one."""
    slots = next(seatings(line))
    num_stages = data.draw(st.integers(1, 4))
    stages = data.draw(st.lists(st.integers(0, num_stages - 1), min_size=len(slots), max_size=len(slots)))
    atoms, slot_costs = [slot.atoms for slot in slots], [slot.cost for slot in slots]
    search = Scattered(atoms, slot_costs, line.entry_bytes, stages, num_stages)
    while True:
        steps = list(_steps(slot_costs, stages, num_stages))
        assert search.step() == bool(steps)
        if not steps:
            break
        smallest = min(peak for peak, _ in steps)
        trials = [trial for peak, trial in steps if peak == smallest]
        stages = min(trials, key=lambda t: score(line, spread(slots, t, len(line.costs)), num_stages)[2])
        assert search.stages == stages


def _steps(costs: list[int], stages: list[int], num_stages: int) -> Iterator[tuple[int, list[int]]]:
    """The larger of the two stages after a step, and all stages then."""
    loads = [sum(c for c, s in zip(costs, stages) if s == stage) for stage in range(num_stages)]
    largest = loads.index(max(loads))
    for slot in (slot for slot, stage in enumerate(stages) if stage == largest):
        for stage in range(num_stages):
            peak = max(loads[largest] - costs[slot], loads[stage] + costs[slot])
            if stage != largest and peak < loads[largest]:
                yield peak, [stage if s == slot else own for s, own in enumerate(stages)]
        for other, stage in enumerate(stages):
            gain = costs[slot] - costs[other]
            peak = max(loads[largest] - gain, loads[stage] + gain)
            if stage != largest and peak < loads[largest]:
                swapped = {slot: stage, other: largest}
                yield peak, [swapped.get(s, own) for s, own in enumerate(stages)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "costs",
    [
        [1000 if i % 97 == 0 else 1 + i % 5 for i in range(10_000)],
        [(100, 300, 5, 5)[i % 4] for i in range(10_000)],
        [1 + i * i * 7919 % 1_000_003 for i in range(10_000)],
    ],
    ids=["few_large", "alike_layers", "all_different"],
)
def test_thousands_of_atoms_need_not_be_contiguous(costs: list[int]) -> None:
    """Looking at every move and swap would take minutes for a step among atoms that cost the same."""
    line = Line(tuple(costs), (1,) * len(costs))
    contiguous, found = (balance(line, 64, contiguous=is_contiguous) for is_contiguous in (True, False))
    assert score(line, found, 64)[:2] < score(line, contiguous, 64)[:2]
    gap = score(line, contiguous, 64)[1] - sum(costs) / 64
    assert score(line, found, 64)[1] - sum(costs) / 64 < 0.6 * gap


def test_communication_decides_between_equal_balances() -> None:
    costs = (2, 1, 1, 2)
    assert balance(Line(costs, (0, 9, 9, 1)), 3) == (0, 1, 1, 2)
    line = Line((1, 1, 1, 1, 1), (0, 5, 5, 1, 5))
    assert balance(line, 2) == (0, 0, 0, 1, 1)
    assert balance(Line(line.costs, (0, 5, 1, 5, 5)), 2) == (0, 0, 1, 1, 1)


def test_evenness_decides_where_communication_is_equal_too() -> None:
    stages = balance(Line((10, 1, 1, 1, 1), (0, 1, 1, 1, 1)), 3)
    assert stages == (0, 1, 1, 2, 2)


@pytest.mark.parametrize("contiguous", [True, False])
def test_more_stages_than_atoms_leaves_the_last_empty(contiguous: bool) -> None:
    assert balance(Line((3, 1), (0, 0)), 4, contiguous=contiguous) == (0, 1)


def test_with_very_many_seatings_light_groups_keep_their_first_seat() -> None:
    groups = tuple(Group((i, i + 8), (i, i + 8)) for i in range(8))
    line = Line(costs=tuple(range(1, 17)), entry_bytes=(1,) * 16, groups=groups)
    stages = balance(line, 3)
    assert all(stages[i] == stages[i + 8] for i in range(8))
    first_seats = tuple(Group(group.atoms, group.seats[:1]) for group in groups)
    plain = Line(line.costs, line.entry_bytes, first_seats)
    assert score(line, stages, 3) <= score(line, balance(plain, 3), 3)
