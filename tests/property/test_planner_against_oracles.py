"""The planner against the one that rescans everything: the same to the action."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.schedules import Policy, Work, compute_order
from smp_lite.plan.segments import SegmentGraph
from tests.planning import chain
from tests.planning_strategies import graphs, partly_done
from tests.property.oracles import order as rescanning

policies = st.builds(
    Policy,
    pipeline=st.sampled_from(["simple", "interleaved", "interleaved"]),
    optimize=st.sampled_from(["memory", "speed"]),
    active_microbatches=st.integers(1, 7),
)


def renumbered(works: Sequence[Work], numbers: Sequence[int]) -> list[Work]:
    return [Work(m, w.graph, w.forward_done, w.backward_done, w.complete) for m, w in zip(numbers, works)]


@st.composite
def chains(draw: st.DrawFn) -> SegmentGraph:
    """Chains of stages that may be visited again, with costs of which many are equal or nothing."""
    stages = draw(st.lists(st.integers(0, 5), min_size=1, max_size=10))
    costs = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.0, 2.0, 3.7]), min_size=10, max_size=10))
    return chain(stages, costs)


@settings(max_examples=300, deadline=None)
@given(graphs() | chains(), st.integers(1, 9), policies)
def test_order_of_equal_microbatches(graph: SegmentGraph, num_microbatches: int, policy: Policy) -> None:
    works = [Work(m, graph) for m in range(num_microbatches)]
    assert compute_order(works, policy) == rescanning.compute_order(works, policy)


@settings(max_examples=300, deadline=None)
@given(st.lists(partly_done() | chains().map(lambda g: Work(0, g)), min_size=1, max_size=7), policies, st.data())
def test_order_of_different_and_partly_done_microbatches(
    parts: list[Work], policy: Policy, data: st.DataObject
) -> None:
    repeated = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=9))
    numbers = data.draw(st.permutations(range(len(repeated))))
    works = renumbered(repeated, [2 * n for n in numbers])
    assert compute_order(works, policy) == rescanning.compute_order(works, policy)
