"""The planner against the one that rescans everything: the same to the action."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.order.row_machines import is_row, run_row
from smp_lite.plan.order.schedules import Policy, Work, compute_order, greedy_order
from smp_lite.plan.order.shapes import shape_of
from smp_lite.plan.order.stage_machines import _Machines
from smp_lite.plan.order.task_table import TaskTable
from smp_lite.plan.step import simulate as new_replay
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.lowering import Schedule, lower
from smp_lite.plan.step.segments import CommandNode, Segment, SegmentGraph, build_graph
from smp_lite.plan.step.simulate import ScheduleDeadlock, simulate
from tests.planning import chain, command
from tests.planning_strategies import RandomRecording, graphs, partly_done, recordings
from tests.property.oracles import lowering as old_lowering
from tests.property.oracles import order as old_order
from tests.property.oracles import segments as old_segments
from tests.property.oracles import simulate as old_replay

NUM_STAGES = 6

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


def check_plan(works: Sequence[Work], policy: Policy, sent: Mapping[int, frozenset[tuple[int, int]]]) -> None:
    """Order, lists and replay are the old ones."""
    order = greedy_order(works, policy)
    assert order == old_order.compute_order(works, policy)
    shapes = [shape_of(work.graph) for work in works]
    if not any(shape and shape.num_visits > 1 for shape in shapes):
        assert compute_order(works, policy) == order
    schedule = lower(order, works, NUM_STAGES, sent=sent)
    assert schedule == old_lowering.lower(order, works, NUM_STAGES, sent=sent)
    for latency_s, bytes_per_s in ((0.0, float("inf")), (0.3, 7.0)):
        times = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        found = simulate(schedule, works, **times)
        assert found == old_replay.simulate(schedule, works, **times)

        def cost(action: Action, segment: Segment) -> float:
            return action.microbatch_index % 3 + (action.kind is ActionKind.BACKWARD) * segment.index

        assert simulate(schedule, works, cost=cost) == old_replay.simulate(schedule, works, cost=cost)


@settings(max_examples=150)
@given(graphs() | chains(), st.integers(1, 9), policies)
def test_equal_microbatches(graph: SegmentGraph, num_microbatches: int, policy: Policy) -> None:
    check_plan([Work(m, graph) for m in range(num_microbatches)], policy, {})


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_unequal_stages_under_a_bound(seed: int) -> None:
    """Forwards come to stages that are idle and may not take them yet."""
    numbers = random.Random(seed)
    for _ in range(20):
        num_stages = numbers.randint(2, NUM_STAGES)
        costs = [numbers.choice([0.1, 1.0, 1.0, 2.0, 3.7]) for _ in range(num_stages)]
        graph = chain(range(num_stages), costs)
        works = [Work(m, graph) for m in range(numbers.randint(2, 9))]
        policy = Policy("interleaved", numbers.choice(["memory", "speed"]), numbers.randint(1, 7))
        assert greedy_order(works, policy) == old_order.compute_order(works, policy)


@st.composite
def rows(draw: st.DrawFn) -> SegmentGraph:
    """Each stage once, in any order, with values that skip some."""
    stages = draw(st.permutations(range(draw(st.integers(1, NUM_STAGES)))))
    commands = []
    for place, stage in enumerate(stages):
        inputs = {place - 1, *draw(st.sets(st.integers(0, place - 1), max_size=2))} if place else ()
        cost = draw(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.0, 2.0, 3.7]))
        commands.append(command(stage, sorted(inputs), place, cost=cost))
    return build_graph(commands, roots=[len(stages) - 1])


@pytest.mark.ci
@settings(max_examples=300)
@given(rows(), st.integers(1, 12), policies.filter(lambda policy: policy.pipeline != "simple"))
def test_rows_need_no_pools(graph: SegmentGraph, num_microbatches: int, policy: Policy) -> None:
    works = [Work(m, graph) for m in range(num_microbatches)]
    table = TaskTable(works)
    assert is_row(table, policy)
    order = run_row(table, policy)
    assert table.actions(order) == old_order.compute_order(works, policy)
    assert order == _Machines(table, policy).run()


@settings(max_examples=150)
@given(graphs(), st.integers(1, 4), policies)
def test_what_is_no_row_is_not_taken_for_one(graph: SegmentGraph, num: int, policy: Policy) -> None:
    """A row has each stage once, and on each a backward."""
    stages = [segment.stage_index for segment in graph.segments]
    if len(set(stages)) < len(stages) or not all(segment.has_backward for segment in graph.segments):
        assert not is_row(TaskTable([Work(m, graph) for m in range(num)]), policy)


@st.composite
def works_and_sent(draw: st.DrawFn) -> tuple[list[Work], dict[int, frozenset[tuple[int, int]]]]:
    """Microbatches of a few kinds in any order; some values have travelled."""
    kinds = draw(st.lists(partly_done() | chains().map(lambda graph: Work(0, graph)), min_size=1, max_size=4))
    repeated = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    numbers = draw(st.permutations(range(len(repeated))))
    works = renumbered(repeated, [2 * number for number in numbers])
    sent = {
        work.microbatch_index: frozenset(
            (value, work.graph.segments[consumer].stage_index)
            for value, consumers in work.graph.consumers.items()
            for consumer in consumers
            if consumer in work.forward_done
        )
        for work in works
        if draw(st.booleans())
    }
    return works, sent


@pytest.mark.ci
@settings(max_examples=150)
@given(works_and_sent(), policies)
def test_different_and_partly_done_microbatches(
    case: tuple[list[Work], dict[int, frozenset[tuple[int, int]]]], policy: Policy
) -> None:
    works, sent = case
    check_plan(works, policy, sent)


def replayed(module: object, schedule: Schedule, works: Sequence[Work]) -> object:
    try:
        return module.simulate(schedule, works)  # type: ignore[attr-defined]
    except (ScheduleDeadlock, KeyError) as error:
        return str(error)


@settings(max_examples=100)
@given(chains(), st.integers(1, 4), policies, st.data())
def test_lists_out_of_order_get_stuck_at_the_same_actions(
    graph: SegmentGraph, num_microbatches: int, policy: Policy, data: st.DataObject
) -> None:
    works = [Work(m, graph) for m in range(num_microbatches)]
    lists = [list(actions) for actions in lower(compute_order(works, policy), works, NUM_STAGES)]
    for _ in range(data.draw(st.integers(1, 3))):
        actions = data.draw(st.sampled_from([actions for actions in lists if actions]))
        one, other = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions[one], actions[other] = actions[other], actions[one]
    schedule = tuple(map(tuple, lists))
    assert replayed(new_replay, schedule, works) == replayed(old_replay, schedule, works)


@st.composite
def annotated(draw: st.DrawFn, recording: RandomRecording) -> list[CommandNode]:
    """The commands with state that they touch and units of parameters."""
    touches = st.sets(st.integers(0, 2), max_size=2).map(sorted).map(tuple)
    return [
        replace(command, touches=draw(touches), unit=draw(st.integers(0, 1)))
        for command in recording.commands
    ]


@pytest.mark.ci
@settings(max_examples=200)
@given(recordings(max_commands=16), st.data())
def test_segments(recording: RandomRecording, data: st.DataObject) -> None:
    commands = data.draw(st.just(recording.commands) | annotated(recording))
    given = {"roots": recording.roots, "needed": recording.needed, "value_bytes": dict.fromkeys(range(9), 8)}
    given["may_grow"] = data.draw(st.booleans())
    graph = build_graph(commands, **given)
    # In which order gradients are added up has tests of its own.
    segments = tuple([replace(segment, backward_after=()) for segment in graph.segments])
    unordered = replace(graph, segments=segments, summed_in_turn=frozenset())
    assert unordered == old_segments.build_graph(commands, **given)
