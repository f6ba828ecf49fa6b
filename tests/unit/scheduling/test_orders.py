"""Bubbles and activations of the papers, on chains; never slower than 1F1B elsewhere.

A forward of a whole stage takes F, a backward B (with a W: B without it).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.order.replay import Replays, shares_of
from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.order.shapes import Shape, shape_of
from smp_lite.plan.order.task_table import TaskTable
from smp_lite.plan.step.actions import COMPUTE_KINDS, ActionKind
from smp_lite.plan.step.segments import SegmentGraph, build_graph
from tests.planning import Planned, chain, command, plan

SIZES = [(p, m * p) for p in range(2, 9) for m in (2, 3, 8)]
OTHER_SIZES = [(p, m) for p in range(2, 9) for m in sorted({1, p - 1, p + 1, 2 * p + 1, 3 * p - 1})]
MANY = 99


def round_robin(num_stages: int, num_visits: int) -> list[int]:
    return list(range(num_stages)) * num_visits


def there_and_back(num_stages: int) -> list[int]:
    return [*range(num_stages), *reversed(range(num_stages))]


def bubble(planned: Planned) -> float:
    """How much longer the step takes than the work of one stage, all having as much."""
    found = planned.simulate()
    return found.makespan - max(found.busy)


def most_held(planned: Planned) -> float:
    """The most microbatches that a stage holds, a visit counted as its share of the stage's visits."""
    most = 0.0
    for stage, actions in enumerate(planned.schedule):
        visits = len({action.visit for action in actions if action.kind is ActionKind.FORWARD})
        weighted = {(a.microbatch_index, a.visit) for a in actions if a.kind is ActionKind.WEIGHT}
        held = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held += 1
            elif action.kind is ActionKind.WEIGHT:
                held -= 1
            elif action.kind is ActionKind.BACKWARD:
                held -= (action.microbatch_index, action.visit) not in weighted
            most = max(most, held / visits)
        assert held == 0, f"stage {stage} keeps something"
    return most


def check_lanes(planned: Planned) -> None:
    """Each visit's F, B and W go by microbatch, and everything is there once."""
    lanes: dict[tuple[ActionKind, int, int], list[int]] = {}
    for action in planned.order:
        lanes.setdefault((action.kind, action.stage_index, action.visit), []).append(action.microbatch_index)
    assert all(lane == list(range(len(planned.works))) for lane in lanes.values())
    assert all(
        [a for a in actions if a.kind in COMPUTE_KINDS] == [a for a in planned.order if a.stage_index == i]
        for i, actions in enumerate(planned.schedule)
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_1f1b(num_stages: int, num_microbatches: int) -> None:
    planned = plan(chain(range(num_stages)), num_microbatches, active_microbatches=MANY)
    assert bubble(planned) == pytest.approx((num_stages - 1) * 3)
    assert most_held(planned) == num_stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize("num_visits", [2, 3])
@pytest.mark.parametrize("pipeline", ["interleaved_virtual", "interleaved"])
def test_interleaved(pipeline: str, num_visits: int, num_stages: int, num_microbatches: int) -> None:
    planned = plan(
        chain(round_robin(num_stages, num_visits)),
        num_microbatches,
        pipeline=pipeline,
        active_microbatches=MANY,
    )
    # The stage's forward takes num_visits, its backward twice that.
    assert bubble(planned) == pytest.approx((num_stages - 1) * 3)
    assert most_held(planned) <= num_stages + (num_stages - 1) / num_visits
    check_lanes(planned)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [*SIZES, *OTHER_SIZES])
@pytest.mark.parametrize("weight_share", [1.0, 0.6])
def test_zb_h1(num_stages: int, num_microbatches: int, weight_share: float) -> None:
    planned = plan(
        chain(range(num_stages), weight_share=weight_share),
        num_microbatches,
        pipeline="zero_bubble",
        active_microbatches=MANY,
    )
    if num_microbatches >= num_stages:
        backward = 2 - weight_share
        assert bubble(planned) == pytest.approx((num_stages - 1) * (1 + backward - weight_share))
    else:
        one_f_one_b = plan(chain(range(num_stages)), num_microbatches, active_microbatches=MANY)
        assert bubble(planned) < bubble(one_f_one_b)
    assert most_held(planned) <= num_stages
    check_lanes(planned)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [*SIZES, *OTHER_SIZES])
def test_zb_v(num_stages: int, num_microbatches: int) -> None:
    planned = plan(
        chain(there_and_back(num_stages), weight_share=1.0),
        num_microbatches,
        pipeline="zero_bubble_v",
        active_microbatches=MANY,
    )
    if num_microbatches >= 2 * num_stages:
        # A piece's forward takes 1, half of the stage's: nothing but the way to the last stage.
        assert bubble(planned) == pytest.approx(num_stages - 1)
    else:
        once = plan(chain(range(num_stages), [2.0] * num_stages), num_microbatches, active_microbatches=MANY)
        assert planned.simulate().makespan <= once.simulate().makespan
    assert most_held(planned) <= num_stages
    check_lanes(planned)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_no_stage_of_zb_v_waits_where_the_last_one_has_two_pieces(
    num_stages: int, num_microbatches: int
) -> None:
    way = there_and_back(num_stages)
    commands = [
        replace(command(stage, [i - 1] if i else [], i, weight_cost=1.0), unit=i)
        for i, stage in enumerate(way)
    ]
    graph = build_graph(commands, roots=[len(way) - 1])
    assert len(graph.segments) == 2 * num_stages
    planned = plan(graph, num_microbatches, pipeline="zero_bubble_v", active_microbatches=MANY)
    for stage in planned.simulate().timings:
        gaps = [later.start - earlier.end for earlier, later in itertools.pairwise(stage)]
        assert max(gaps) < 1e-6
    assert most_held(planned) <= num_stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_round_robin_with_w_has_the_bubble_of_zb_v(num_stages: int, num_microbatches: int) -> None:
    graph = chain(round_robin(num_stages, 2), weight_share=1.0)
    planned = plan(graph, num_microbatches, pipeline="zero_bubble", active_microbatches=MANY)
    assert bubble(planned) == pytest.approx(num_stages - 1)
    assert most_held(planned) <= num_stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [s for s in OTHER_SIZES if s[1] > s[0]])
@pytest.mark.parametrize("way", [lambda p: round_robin(p, 2), there_and_back], ids=["round robin", "v"])
@pytest.mark.parametrize("pipeline", ["interleaved", "interleaved_virtual", "zero_bubble", "zero_bubble_v"])
def test_pieces_are_never_slower_than_1f1b_of_whole_stages(
    pipeline: str, way: object, num_stages: int, num_microbatches: int
) -> None:
    graph = chain(way(num_stages), weight_share=1.0)  # type: ignore[operator]
    planned = plan(graph, num_microbatches, pipeline=pipeline, active_microbatches=MANY)
    once = plan(chain(range(num_stages), [2.0] * num_stages), num_microbatches, active_microbatches=MANY)
    assert planned.simulate().makespan <= once.simulate().makespan + 1e-6
    check_lanes(planned)


@st.composite
def rows_and_trees(draw: st.DrawFn) -> SegmentGraph:
    """Stages once each, in a row or with branches and skips, some visited once more at the end."""
    num_stages = draw(st.integers(2, 6))
    costs = st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 3.3])
    commands = []
    for i in range(num_stages + draw(st.integers(0, 1))):
        sources = {draw(st.integers(0, i - 1)), i - 1} if i else set()
        cost = draw(costs)
        inputs = sorted(sources)
        weight_cost = cost * draw(st.sampled_from([0.0, 0.4, 1.0]))
        commands.append(command(i % num_stages, inputs, i, cost=cost, weight_cost=weight_cost))
    return build_graph(commands, roots=[len(commands) - 1])


@settings(max_examples=150)
@given(
    rows_and_trees(),
    st.integers(1, 20),
    st.sampled_from(["zero_bubble", "zero_bubble_v", "interleaved_virtual"]),
    st.sampled_from(["memory", "speed"]),
    st.integers(1, 8),
)
def test_unequal_stages_branches_and_skips_are_never_slower_than_1f1b(
    graph: SegmentGraph, num_microbatches: int, pipeline: str, optimize: str, active: int
) -> None:
    options = {"optimize": optimize, "active_microbatches": active}
    one_f_one_b = plan(graph, num_microbatches, **options)  # type: ignore[arg-type]
    planned = plan(graph, num_microbatches, pipeline=pipeline, **options)  # type: ignore[arg-type]
    shape = shape_of(graph)
    if shape is None or shape.num_visits == 1:
        assert planned.simulate().makespan <= one_f_one_b.simulate().makespan * (1 + 1e-6)
    if shape is not None and shape.num_visits == 1:
        assert most_held(planned) <= active
    check_lanes(planned)


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("pipeline", ["interleaved_virtual", "zero_bubble", "zero_bubble_v"])
@pytest.mark.parametrize("way", [[0, 1, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0]])
def test_no_stage_holds_more_than_is_active(way: list[int], pipeline: str, active: int) -> None:
    planned = plan(chain(way, weight_share=1.0), 7, pipeline=pipeline, active_microbatches=active)
    assert most_held(planned) <= active
    check_lanes(planned)


def test_shapes() -> None:
    assert shape_of(chain([2, 0, 1])) == Shape((2, 0, 1), 1)
    assert shape_of(chain([0, 1, 2, 0, 1, 2])) == Shape((0, 1, 2), 2)
    assert shape_of(chain([0, 1, 2, 2, 1, 0])) == Shape((0, 1, 2), 2, is_v=True)
    assert shape_of(chain([0, 1, 2, 0])) is None
    assert shape_of(chain([0, 1, 2, 1, 0, 1])) is None


def test_the_order_does_not_depend_on_the_order_of_works_and_their_numbers_may_have_gaps() -> None:
    graph = chain([0, 1, 1, 0], weight_share=0.7)
    works = [Work(3 * m, graph) for m in range(6)]
    for pipeline in ("zero_bubble", "zero_bubble_v", "interleaved_virtual", "interleaved"):
        order = compute_order(works, Policy(pipeline))
        assert order == compute_order(works[::-1], Policy(pipeline))
        tight = compute_order([Work(m, graph) for m in range(6)], Policy(pipeline))
        assert [a._replace(microbatch_index=a.microbatch_index // 3) for a in order] == tight


@pytest.mark.parametrize("pipeline", ["zero_bubble", "zero_bubble_v", "interleaved_virtual", "interleaved"])
def test_nothing_has_been_recorded_yet(pipeline: str) -> None:
    """A buffer was looked at before the first call; or the step does not use the model at all."""
    for complete in (False, True):
        works = [Work(m, build_graph([]), complete=complete) for m in range(2)]
        assert compute_order(works, Policy(pipeline)) == []


def test_lists_that_wait_for_one_another_are_no_candidate() -> None:
    table = TaskTable([Work(0, chain([0, 1]))])
    names = [str(action) for action in table.actions(range(table.num_tasks))]
    of = {name: task for task, name in enumerate(names)}
    replays = Replays(table, shares_of(table))
    assert replays.play([[of["0B0"], of["0F0"]], [of["1F0"], of["1B0"]]]) is None
    found = replays.play([[of["0F0"], of["0B0"]], [of["1F0"], of["1B0"]]])
    assert found is not None
    assert list(map(str, table.actions(found.tasks))) == ["0F0", "1F0", "1B0", "0B0"]
    assert (found.makespan, found.peaks) == (6.0, (1.0, 1.0))
