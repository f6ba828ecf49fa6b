"""The partitioner against the one whose dynamic programme looks at every window: the same decision."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.partitioning.balance import Group, Line, balance
from smp_lite.plan.partitioning.partition import ModuleCost
from smp_lite.plan.partitioning.solver import solve_partition
from smp_lite.plan.partitioning.virtual_stages import VirtualStages, balance_pieces, piece_stages
from tests.planning_strategies import module_trees
from tests.property.oracles import balance as old
from tests.property.oracles import solver as old_solver
from tests.property.oracles import virtual_stages as old_pieces

COSTS = [
    st.integers(0, 3),
    st.integers(0, 100),
    st.sampled_from([0, 0, 1, 1000]),
    st.integers(10**40, 10**40 + 1000),
]


@st.composite
def lines(draw: st.DrawFn, *, min_size: int = 1, max_size: int = 60) -> Line:
    costs = draw(st.lists(draw(st.sampled_from(COSTS)), min_size=min_size, max_size=max_size))
    sizes = draw(st.sampled_from([st.just(0), st.integers(0, 2), st.integers(0, 10**12)]))
    entry_bytes = draw(st.lists(sizes, min_size=len(costs), max_size=len(costs)))
    return Line(tuple(costs), tuple(entry_bytes))


@st.composite
def grouped_lines(draw: st.DrawFn, *, min_size: int = 1, max_size: int = 16) -> Line:
    line = draw(lines(min_size=min_size, max_size=max_size))
    left = draw(st.permutations(range(len(line.costs))))
    groups = []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(2, 5))
        atoms, left = tuple(sorted(left[:size])), left[size:]
        if len(atoms) > 1:
            groups.append(Group(atoms, draw(st.sampled_from([atoms, atoms[:1]]))))
    return Line(line.costs, line.entry_bytes, tuple(groups))


@settings(max_examples=400)
@given(lines(), st.integers(1, 12))
def test_contiguous(line: Line, num_stages: int) -> None:
    assert balance(line, num_stages) == old.balance(line, num_stages)


@settings(max_examples=150)
@given(grouped_lines(), st.integers(1, 6))
def test_groups(line: Line, num_stages: int) -> None:
    assert balance(line, num_stages) == old.balance(line, num_stages)


@settings(max_examples=60)
@given(grouped_lines() | lines(max_size=24), st.integers(1, 6))
def test_scattered(line: Line, num_stages: int) -> None:
    assert balance(line, num_stages, contiguous=False) == old.balance(line, num_stages, contiguous=False)


SHAPES: list[VirtualStages] = [2, 3, 4, "v"]


@pytest.mark.ci
@settings(max_examples=80)
@given(
    grouped_lines(min_size=14, max_size=24) | lines(min_size=20), st.integers(2, 8), st.sampled_from(SHAPES)
)
def test_several_pieces(line: Line, num_stages: int, shape: VirtualStages) -> None:
    pieces = piece_stages(num_stages, shape)
    assert balance_pieces(line, num_stages, pieces) == old_pieces.balance_pieces(line, num_stages, pieces)


@pytest.mark.parametrize("largest", [2, 3, 5])
def test_several_pieces_of_many_small_atoms(largest: int) -> None:
    """Many moves are equally good here, so which one is taken shows."""
    numbers = random.Random(largest)
    for _ in range(10):
        costs = tuple(numbers.randint(0, largest) for _ in range(numbers.randint(18, 40)))
        line = Line(costs, (0,) * len(costs))
        num_stages = numbers.randint(3, 8)
        pieces = piece_stages(num_stages, numbers.choice((2, 3)))
        assert balance_pieces(line, num_stages, pieces) == old_pieces.balance_pieces(line, num_stages, pieces)


@settings(max_examples=200)
@given(module_trees(max_leaves=30), st.integers(1, 8), st.sampled_from([0.0, 0.2, 0.8, 1.0]), st.booleans())
def test_modules(root: ModuleCost, num_stages: int, memory_weight: float, contiguous: bool) -> None:
    options = {"memory_weight": memory_weight, "contiguous": contiguous}
    found = solve_partition(root, num_stages, **options)
    assert found == old_solver.solve_partition(root, num_stages, **options)
