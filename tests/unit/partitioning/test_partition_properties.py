"""Automatic placement of random module trees: invariants, and distance from the true optimum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.partitioning.partition import ModuleCost, Partition
from smp_lite.plan.partitioning.report import stage_summaries
from smp_lite.plan.partitioning.solver import solve_partition
from tests.planning_strategies import module_trees as trees


def _stages(partition: Partition, *names: str) -> list[int]:
    return [partition.stage_of[name] for name in names]


def _largest_share(root: ModuleCost, partition: Partition, memory_weight: float) -> float:
    return max(summary.cost(memory_weight) for summary in stage_summaries(root, partition))


def _holders(module: ModuleCost) -> list[ModuleCost]:
    return [each for each in module.walk() if each.parameter_ids]


weights = st.sampled_from([0.0, 0.2, 0.8, 1.0])


@settings(max_examples=200)
@given(trees(), st.integers(1, 5), weights, st.booleans())
def test_invariants(root: ModuleCost, num_stages: int, weight: float, contiguous: bool) -> None:
    partition = solve_partition(root, num_stages, memory_weight=weight, contiguous=contiguous)
    stage_of = partition.stage_of
    partition.check(root)  # every module placed once, shared parameters together
    assert stage_of[""] == 0
    units: dict[str, set[str]] = {}
    for holder in _holders(root):
        units.setdefault(holder.parameter_ids[0], set()).add(holder.name)
    used = {stage_of[holder.name] for holder in _holders(root)}
    assert used == set(range(min(num_stages, len(units))))
    for module in root.walk():
        span = {stage_of[holder.name] for holder in _holders(module)}
        if span and not module.parameter_ids:
            assert stage_of[module.name] == min(span)
        for child in module.children:
            if not _holders(child):
                assert stage_of[child.name] == stage_of[module.name]


@settings(max_examples=200)
@given(trees(shared=False), st.integers(1, 5), weights)
def test_contiguous_and_close_to_the_enumerated_optimum_of_single_modules(
    root: ModuleCost, num_stages: int, weight: float
) -> None:
    """Whole blocks are preferred, so the optimum over all cuts between single modules may be
    missed: by 10 % where it was not worth opening a block, by another tenth of the mean for what is
    too small to be opened.
    """
    partition = solve_partition(root, num_stages, memory_weight=weight)
    holders = _called_in_order(root)
    assert _stages(partition, *holders) == sorted(_stages(partition, *holders))
    num_parts = min(num_stages, len(holders))
    best = min(
        _largest_share(root, _cut_at(root, holders, num_stages, cuts), weight)
        for cuts in combinations(range(1, len(holders)), num_parts - 1)
    )
    mean = sum(s.cost(weight) for s in stage_summaries(root, partition)) / num_stages
    limit = max(1.1 * mean, (best + 0.1 * mean) / 0.9)
    assert _largest_share(root, partition, weight) <= limit + 1e-9


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_a_flat_model_gets_the_enumerated_optimum(computes: list[int], num_stages: int) -> None:
    leaves = (ModuleCost(str(i), (f"{i}.w",), compute=c, order=i) for i, c in enumerate(computes))
    root = ModuleCost("", children=tuple(leaves))
    partition = solve_partition(root, num_stages, memory_weight=0.0)
    holders = _called_in_order(root)
    num_parts = min(num_stages, len(holders))
    best = min(
        _largest_share(root, _cut_at(root, holders, num_stages, cuts), 0.0)
        for cuts in combinations(range(1, len(holders)), num_parts - 1)
    )
    assert _largest_share(root, partition, 0.0) == pytest.approx(best, rel=1e-12)


def _called_in_order(root: ModuleCost) -> list[str]:
    return [holder.name for holder in sorted(_holders(root), key=lambda holder: holder.order)]


def _cut_at(root: ModuleCost, holders: list[str], num_stages: int, cuts: Sequence[int]) -> Partition:
    stage_of = {name: sum(i >= cut for cut in cuts) for i, name in enumerate(holders)}
    return Partition(num_stages, {m.name: stage_of.get(m.name, 0) for m in root.walk()})
