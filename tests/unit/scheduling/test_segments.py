"""How commands are grouped into segments and where their gradients flow, on known shapes."""

from __future__ import annotations

from dataclasses import replace

from smp_lite.plan.step.segments import CommandNode, SegmentGraph, build_graph
from tests.planning import chain, command, segment_at


def grouping(graph: SegmentGraph) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(s.stage_index, s.visit, s.commands) for s in graph.segments]


def test_chain_gives_one_segment_a_stage() -> None:
    graph = chain([0, 0, 1, 1, 2])
    assert grouping(graph) == [(0, 0, (0, 1)), (1, 0, (2, 3)), (2, 0, (4,))]
    assert [(s.imports, s.exports) for s in graph.segments] == [
        ((), (1,)),
        ((1,), (3,)),
        ((3,), ()),
    ]
    assert [(s.gradient_imports, s.gradient_exports) for s in graph.segments] == [
        ((), (1,)),
        ((1,), (3,)),
        ((3,), ()),
    ]
    assert [s.roots for s in graph.segments] == [(), (), (4,)]
    assert [s.forward_cost for s in graph.segments] == [2, 2, 1]


def test_tied_embeddings_give_the_first_stage_two_segments() -> None:
    graph = chain([0, 1, 0])
    assert grouping(graph) == [(0, 0, (0,)), (1, 0, (1,)), (0, 1, (2,))]


def test_zigzag_gives_a_segment_for_each_turn() -> None:
    assert grouping(chain([0, 1, 0, 1, 0])) == [
        (0, 0, (0,)),
        (1, 0, (1,)),
        (0, 1, (2,)),
        (1, 1, (3,)),
        (0, 2, (4,)),
    ]


def test_long_skip_joins_the_segment_that_it_does_not_depend_on() -> None:
    """Stage 0's second command needs nothing from stage 1, so it runs with the first one."""
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(0, [0], 2), command(1, [1, 2], 3)],
        roots=[3],
    )
    assert grouping(graph) == [(0, 0, (0, 2)), (1, 0, (1, 3))]
    assert segment_at(graph, 1).imports == (0, 2)


def test_branches_on_two_stages_join_on_a_third() -> None:
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(2, [0], 2), command(3, [1, 2], 3)],
        roots=[3],
    )
    assert grouping(graph) == [(0, 0, (0,)), (1, 0, (1,)), (2, 0, (2,)), (3, 0, (3,))]
    join, source = segment_at(graph, 3), segment_at(graph, 0)
    assert [graph.segments[i].stage_index for i in graph.forward_inputs(join)] == [1, 2]
    assert [graph.segments[i].stage_index for i in graph.backward_inputs(source)] == [1, 2]
    assert graph.remote_stages(0) == (1, 2)


def test_branch_and_join_on_one_stage_are_one_segment() -> None:
    """The join does not depend on its own stage's branch through the other stage."""
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(2, [0], 2), command(1, [1, 2], 3)],
        roots=[3],
    )
    assert grouping(graph) == [(0, 0, (0,)), (2, 0, (2,)), (1, 0, (1, 3))]
    assert segment_at(graph, 1).imports == (0, 2)


def test_uses_of_a_value_that_others_have_used_meanwhile_begin_a_segment() -> None:
    """Its gradients of stage 1's last two uses come first in one process, then stage 2's, then the first."""
    commands = [command(0, [], 0), command(1, [0], 1), command(2, [0], 2)]
    commands += [command(1, [0], 3), command(1, [0], 4), command(3, [1, 2, 3, 4], 5)]
    graph = build_graph(commands, roots=[5])
    assert grouping(graph) == [(0, 0, (0,)), (1, 0, (1,)), (2, 0, (2,)), (1, 1, (3, 4)), (3, 0, (5,))]
    assert graph.summed_in_turn == {0}
    two_uses = build_graph([*commands[:3], command(3, [1, 2], 3)], roots=[3])
    assert two_uses.summed_in_turn == frozenset()  # a + b is b + a


def test_what_has_run_stays_in_its_segments() -> None:
    """Whatever is recorded later: a third use of value 0, and that a loss needs it."""
    commands = [command(0, [], 0), command(1, [0], 1), command(2, [0], 2), command(1, [2, 0], 3)]
    early = grouping(build_graph(commands, may_grow=True))
    assert early == [(0, 0, (0,)), (1, 0, (1,)), (2, 0, (2,)), (1, 1, (3,))]
    later = build_graph([*commands, replace(command(2, [0, 3], 4), epoch=1)], roots=[4], may_grow=True)
    assert grouping(later)[:4] == early


def test_segment_opened_early_and_joined_late_is_numbered_after_what_it_needs() -> None:
    """Stage 0's segment begins before stage 1's, and its second command needs stage 1's value."""
    graph = build_graph([command(0, [], 0), command(1, [], 1), command(0, [0, 1], 2)], roots=[2])
    assert grouping(graph) == [(1, 0, (1,)), (0, 0, (0, 2))]


def test_segment_joined_late_passes_what_it_needs_on_to_those_that_need_it() -> None:
    """Stage 1 needs stage 0's segment, which later needs stage 2's: no circle back to stage 2."""
    graph = build_graph(
        [
            command(0, [], 0),
            command(1, [0], 1),
            command(2, [], 2),
            command(0, [0, 2], 3),
            command(2, [1], 4),
        ],
        roots=[4],
    )
    assert grouping(graph) == [(2, 0, (2,)), (0, 0, (0, 3)), (1, 0, (1,)), (2, 1, (4,))]


def test_gradients_of_a_value_come_back_from_its_latest_consumer_first() -> None:
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(0, [0, 1], 2), command(1, [0, 2], 3)],
        roots=[3],
    )
    latest, between, first = segment_at(graph, 1, 1), segment_at(graph, 0, 1), segment_at(graph, 1)
    assert graph.summed_in_turn == {0}  # stage 1 would add its own two up first
    assert graph.gradient_sources(segment_at(graph, 0), 0) == (first.index,)
    assert graph.gradient_sources(first, 0) == (between.index,)
    assert graph.gradient_sources(between, 0) == (latest.index,)
    assert graph.gradient_target(latest, 0) == between
    assert graph.gradient_target(first, 0) == segment_at(graph, 0)
    assert [graph.sums_taken(s) for s in (latest, between, first)] == [(), (0,), (0,)]


def test_frozen_part_has_no_backward() -> None:
    """The first command's output does not require gradients, so nothing links to its input."""
    graph = build_graph(
        [command(0, [], 0), CommandNode(1, (0,), (1,), links=((),)), command(2, [1], 2)],
        roots=[2],
    )
    assert [s.has_backward for s in graph.segments] == [False, True, True]
    assert segment_at(graph, 1).gradient_imports == ()
    assert graph.backward_inputs(segment_at(graph, 0)) == ()
    assert graph.remote_stages(0) == (1,)


def test_output_that_the_loss_does_not_use_gets_no_gradient() -> None:
    graph = build_graph(
        [
            CommandNode(0, (), (0, 1), links=((), ())),
            command(1, [0], 2),
            CommandNode(1, (1,), (3,), links=((1,),)),
        ],
        roots=[2],
        needed=[3],
    )
    assert segment_at(graph, 0).exports == (0, 1)
    assert segment_at(graph, 0).gradient_exports == (0,)
    assert segment_at(graph, 1).imports == (0, 1)
    assert segment_at(graph, 1).gradient_imports == (0,)
    assert segment_at(graph, 1).exports == (3,)


def test_loss_in_the_middle_has_a_backward_there() -> None:
    graph = build_graph([command(0, [], 0), command(1, [0], 1)], roots=[0])
    assert [s.has_backward for s in graph.segments] == [True, False]
    assert segment_at(graph, 0).roots == (0,)
    assert segment_at(graph, 0).gradient_exports == ()


def test_forced_execution_separates_segments() -> None:
    graph = build_graph([command(0, [], 0), command(0, [0], 1, epoch=1)], roots=[1])
    assert grouping(graph) == [(0, 0, (0,)), (0, 1, (1,))]
    assert [s.epoch for s in graph.segments] == [0, 1]
    assert graph.remote_stages(0) == ()


def test_bytes_are_kept_for_cut_values_only() -> None:
    commands = [command(0, [], 0), command(0, [0], 1), command(1, [1], 2)]
    graph = build_graph(commands, roots=[2], value_bytes={0: 10, 1: 20, 2: 30})
    assert graph.value_bytes == {1: 20}


def test_no_commands_no_segments() -> None:
    assert build_graph([]).segments == ()
