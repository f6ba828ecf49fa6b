"""``W`` in the planner: costs, lists, memory, text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp_lite.plan.order.schedules import Policy, Work, compute_order, greedy_order
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.lowering import lower
from smp_lite.plan.step.schedule_text import compute_lists
from smp_lite.plan.step.segments import build_graph
from smp_lite.plan.step.simulate import ScheduleDeadlock, simulate
from tests.planning import chain, command, plan


def test_a_backward_costs_what_its_w_leaves() -> None:
    planned = plan(chain([0], [3.0], weight_share=0.5), 1, pipeline="zero_bubble")
    (timings,) = planned.simulate().timings
    assert [(str(t.action), t.start, t.end) for t in timings] == [
        ("0F0", 0, 3),
        ("0B0", 3, 3 + 6 - 1.5),
        ("0W0", 7.5, 9),
    ]


def test_where_nothing_is_left_of_a_backward_it_still_takes_time() -> None:
    planned = plan(chain([0], weight_share=5.0), 1, pipeline="zero_bubble")
    assert 0 < planned.simulate().makespan - 6 < 1e-6


def test_only_what_has_weights_has_a_w() -> None:
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1, weight_cost=1.0), command(0, [1], 2)], roots=[2]
    )
    assert (
        compute_lists(plan(graph, 1, pipeline="zero_bubble").schedule) == "0F0 0F0.1 0B0.1 0B0\n1F0 1B0 1W0"
    )


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_a_policy_that_does_not_split_has_none(pipeline: str) -> None:
    with_weights = plan(chain([0, 1, 0], weight_share=1.0), 3, pipeline=pipeline)
    assert with_weights.schedule == plan(chain([0, 1, 0]), 3, pipeline=pipeline).schedule
    assert (
        with_weights.simulate().makespan == plan(chain([0, 1, 0]), 3, pipeline=pipeline).simulate().makespan
    )


def test_w_is_part_of_one_cost_whatever_the_order() -> None:
    for pipeline in ("interleaved", "zero_bubble"):
        assert plan(
            chain([0, 1, 2], weight_share=0.7), 5, pipeline=pipeline
        ).simulate().work == pytest.approx(45)


def test_a_w_sends_nothing() -> None:
    planned = plan(chain([0, 1], weight_share=1.0), 2, pipeline="zero_bubble")
    assert [action for action in planned.schedule[0] if action.value is not None] == [
        action for action in plan(chain([0, 1]), 2).schedule[0] if action.value is not None
    ]


def test_w_of_what_has_run_backward_is_not_planned_again() -> None:
    graph = chain([0, 1], weight_share=1.0)
    work = Work(0, graph, frozenset({0, 1}), backward_done=frozenset({1}))
    assert [str(a) for a in compute_order([work], Policy("zero_bubble"))] == ["0B0", "0W0"]
    still_recorded = Work(0, graph, complete=False)
    assert [str(a) for a in compute_order([still_recorded], Policy("zero_bubble"))] == ["0F0", "1F0"]


def test_a_w_before_its_backward_never_runs() -> None:
    graph = chain([0], weight_share=1.0)
    order = [Action(0, kind, 0) for kind in (ActionKind.FORWARD, ActionKind.WEIGHT, ActionKind.BACKWARD)]
    with pytest.raises(ScheduleDeadlock, match="stages wait at 0W0"):
        simulate(lower(order, [Work(0, graph)], 1), [Work(0, graph)])


def test_several_visits_that_change_one_state_go_by_microbatch() -> None:
    """All W of a stage, as its forwards and backwards."""
    graph = build_graph(
        [
            command(0, [], 0, weight_cost=1.0),
            command(1, [0], 1, weight_cost=1.0),
            command(0, [1], 2, weight_cost=1.0),
        ],
        roots=[2],
    )
    free = plan(graph, 3, pipeline="zero_bubble")
    bound = plan(replace(graph, ordered=frozenset({0})), 3, pipeline="zero_bubble")
    numbers = [a.microbatch_index for a in bound.order if a.stage_index == 0 and a.kind is ActionKind.WEIGHT]
    assert numbers == sorted(numbers)
    assert len(numbers) == len([a for a in free.order if a.stage_index == 0 and a.kind is ActionKind.WEIGHT])


@pytest.mark.parametrize("num_stages", [2, 4, 6])
def test_the_machines_hold_no_more_than_the_first_stage_of_1f1b(num_stages: int) -> None:
    works = [Work(m, chain(range(num_stages), weight_share=1.0)) for m in range(3 * num_stages)]
    order = greedy_order(works, Policy("zero_bubble", active_microbatches=99))
    late = False
    for stage in range(num_stages):
        held = most = unbacked = most_unbacked = 0
        for action in (action for action in order if action.stage_index == stage):
            held += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.WEIGHT)
            unbacked += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
            most, most_unbacked = max(most, held), max(most_unbacked, unbacked)
        assert most <= num_stages
        assert most_unbacked == num_stages - stage
        late = late or most > most_unbacked
    assert late, "W wait where there is room"
