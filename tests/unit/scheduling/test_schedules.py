"""The orders of known policies on known graphs, drawn; what a policy refuses.

A row is a stage, time goes right, a backward takes twice its forward, dots are idle.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from smp_lite.plan.order.schedules import Policy, Work, compute_order, forward_depth
from smp_lite.plan.step.schedule_text import compute_lists
from smp_lite.plan.step.segments import CommandNode, build_graph
from tests.planning import chain, command, plan, plan_works


def drawing(text: str) -> str:
    return dedent(text).strip("\n")


def test_interleaved_chain_is_1f1b() -> None:
    assert plan(chain([0, 1, 2, 3]), 6).staircase() == drawing(
        """
        stage 0  F0 F1 F2 F3 ..................B0    F4 B1    F5 B2    ...B3    ...B4    ...B5
        stage 1  ...F0 F1 F2 ............B0    F3 B1    F4 B2    F5 B3    ...B4    ...B5    ......
        stage 2  ......F0 F1 ......B0    F2 B1    F3 B2    F4 B3    F5 B4    ...B5    ............
        stage 3  .........F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5    ..................
        """
    )


def test_simple_chain_is_gpipe() -> None:
    assert plan(chain([0, 1, 2]), 4, pipeline="simple").staircase() == drawing(
        """
        stage 0  F0 F1 F2 F3 ..................B0    B1    B2    B3
        stage 1  ...F0 F1 F2 F3 .........B0    B1    B2    B3    ......
        stage 2  ......F0 F1 F2 F3 B0    B1    B2    B3    ............
        """
    )


def test_only_forward_has_no_backward() -> None:
    graph = build_graph([command(0, [], 0), command(1, [0], 1)])
    assert plan(graph, 3, pipeline="_only_forward").staircase() == drawing(
        """
        stage 0  F0 F1 F2 ...
        stage 1  ...F0 F1 F2
        """
    )


def test_speed_starts_microbatches_as_soon_as_it_can() -> None:
    assert plan(chain([0, 1, 2]), 4, optimize="speed").staircase() == drawing(
        """
        stage 0  F0 F1 F2 F3 .........B0    ...B1    ...B2    ...B3
        stage 1  ...F0 F1 F2 F3 B0    ...B1    ...B2    ...B3    ......
        stage 2  ......F0 B0    F1 B1    F2 B2    F3 B3    ............
        """
    )


def test_one_active_microbatch_is_no_pipeline() -> None:
    assert plan(chain([0, 1]), 2, active_microbatches=1).staircase() == drawing(
        """
        stage 0  F0 .........B0    F1 .........B1
        stage 1  ...F0 B0    .........F1 B1    ......
        """
    )


def test_tied_embeddings_make_a_u() -> None:
    assert plan(chain([0, 1, 0]), 2).staircase() == drawing(
        """
        stage 0  F0   F1   F0.1 B0.1      F1.1 B1.1      B0        B1
        stage 1  .....F0   F1   ..........B0        .....B1        ..........
        """
    )


def test_zigzag() -> None:
    assert plan(chain([0, 1, 0, 1]), 2).staircase() == drawing(
        """
        stage 0  F0   F1   F0.1 F1.1 ..........B0.1      .....B1.1      B0        B1
        stage 1  .....F0   F1   F0.1 B0.1      F1.1 B1.1      B0        B1        ..........
        """
    )


def test_branches_run_side_by_side() -> None:
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(2, [0], 2), command(3, [1, 2], 3)],
        roots=[3],
    )
    assert plan(graph, 3).staircase() == drawing(
        """
        stage 0  F0 F1 F2 ............B0    ...B1    ...B2
        stage 1  ...F0 F1 ......B0    F2 B1    ...B2    ......
        stage 2  ...F0 F1 ......B0    F2 B1    ...B2    ......
        stage 3  ......F0 B0    F1 B1    F2 B2    ............
        """
    )


def test_forward_depth_of_a_stage_counts_from_its_first_segment() -> None:
    assert forward_depth(chain([0, 1, 2])) == {0: 3, 1: 2, 2: 1}
    assert forward_depth(chain([0, 1, 0])) == {0: 3, 1: 2}


def test_what_has_run_is_not_scheduled_again() -> None:
    graph = chain([0, 1, 0])
    work = Work(0, graph, frozenset({0, 1, 2}), backward_done=frozenset({2}))
    assert [str(action) for action in compute_order([work], Policy())] == ["1B0", "0B0"]


def test_microbatch_still_being_recorded_gets_its_forwards_only() -> None:
    works = [Work(0, chain([0, 1])), Work(1, chain([0, 1]), complete=False)]
    planned = plan_works(works, Policy())
    assert compute_lists(planned.schedule) == "0F0 0F1 0B0\n1F0 1B0 1F1"


def test_oldest_microbatch_is_never_held_back() -> None:
    """Microbatch 1 begins first, on another stage, and needs microbatch 0 to have passed."""
    works = [Work(0, build_graph([command(1, [], 0)], roots=[0])), Work(1, chain([0, 1]))]
    order = compute_order(works, Policy(active_microbatches=1))
    assert [str(action) for action in order] == ["0F1", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_longer_forward_is_run_for_longer() -> None:
    assert plan(chain([0, 1], costs=[2, 1]), 2).staircase() == drawing(
        """
        stage 0  F0    F1    ...B0          B1
        stage 1  ......F0 B0    F1 B1    ...............
        """
    )


def test_order_does_not_depend_on_the_order_of_works() -> None:
    works = [Work(m, chain([0, 1, 0])) for m in range(3)]
    assert compute_order(works[::-1], Policy()) == compute_order(works, Policy())


def test_evaluation_of_a_step_with_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="remove the call, or set pipeline to 'interleaved'"):
        plan(chain([0]), 1, pipeline="_only_forward")


def test_segment_without_backward_is_never_run_backward() -> None:
    frozen = CommandNode(1, (0,), (1,), links=((),))
    graph = build_graph([command(0, [], 0), frozen], roots=[1])
    assert compute_lists(plan(graph, 1).schedule) == "0F0\n1F0 1B0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "gpipe"}, r"pipeline must be a value in: \['simple', .* got 'gpipe'"),
        ({"optimize": "size"}, r"optimize must be a value in: \['speed', 'memory'\], got 'size'"),
        ({"active_microbatches": 0}, "active_microbatches must be positive, got 0"),
    ],
)
def test_unknown_policy_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**options)
