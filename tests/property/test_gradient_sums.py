"""Gradients are added up in one process's grouping, whatever segments use a value or a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
from hypothesis import event, given, settings

from smp_lite.plan.step.segments import Segment, SegmentGraph
from tests.planning_strategies import RandomRecording, recordings

# One gradient is the number of the command that adds it, and which of its own it is; a sum is a pair, whose
# first one gives it its strides. That with which a backward begins comes first.
SEED = (-1, 0)
Sum = Any


def added(total: Sum | None, more: Sum) -> Sum:
    return more if total is None else (total, more)


def own_gradients(recording: RandomRecording, commands: Sequence[int], value: int) -> list[Sum]:
    """What these commands add to the value's gradient, as autograd does: the latest first."""
    wanted = set(recording.roots)
    found: list[Sum] = []
    for i in reversed(range(len(recording.commands))):
        command = recording.commands[i]
        reached = [
            linked for output, linked in zip(command.outputs, command.links, strict=True) if output in wanted
        ]
        wanted.update(v for linked in reached for v in linked)
        number = sum(linked.count(value) for linked in reached)
        if i in commands:
            found += [(i, k) for k in range(number)]
    return found


def sum_by_segments(recording: RandomRecording, graph: SegmentGraph, value: int) -> Sum | None:
    """The value's gradient as the graph says that stages send it, and its producer adds its own."""
    sums: dict[int, Sum | None] = {}

    def taken(index: int, start: Sum | None = None) -> Sum | None:
        by_stage: dict[int, Sum | None] = {}
        segment = graph.segments[index]
        for source in graph.gradient_sources(segment, value):  # the latest first
            stage = graph.segments[source].stage_index
            key = stage if stage != segment.stage_index else -1 - source
            by_stage[key] = added(by_stage.get(key), sums[source])
        return reduce(added, by_stage.values(), start)

    consumers = [s.index for s in graph.segments if value in s.gradient_imports]
    for index in reversed(consumers):
        start = taken(index) if value in graph.summed_in_turn else None
        if value in graph.seeds_taken(graph.segments[index]):
            assert start is None
            start = SEED
        sums[index] = reduce(added, own_gradients(recording, graph.segments[index].commands, value), start)
    home = graph.segments[graph.producer[value]]
    begun = SEED if value in recording.roots and value not in graph.summed_in_turn else None
    late = [command for command, used in home.late_uses if used == value]
    others = [command for command in home.commands if command not in late]
    total = reduce(added, own_gradients(recording, late, value), None)
    from_others = taken(home.index, begun)
    if from_others is not None:
        total = added(total, from_others)
    return reduce(added, own_gradients(recording, others, value), total)


@pytest.mark.ci
@settings(max_examples=500)
@given(recordings())
def test_gradients_are_grouped_as_in_one_process(recording: RandomRecording) -> None:
    graph = recording.graph()
    event(f"{min(len(graph.summed_in_turn), 2)} values or more are summed in turn")
    every = range(len(recording.commands))
    for value in graph.producer:
        seed = SEED if value in recording.roots else None
        whole = reduce(added, own_gradients(recording, every, value), seed)
        assert sum_by_segments(recording, graph, value) == whole


@settings(max_examples=200)
@given(recordings())
def test_a_stage_goes_through_its_segments_backward_in_reverse(recording: RandomRecording) -> None:
    """They may share parameters; and their order is that of their commands."""
    graph = recording.graph()
    before: dict[int, set[int]] = {}  # each backward's, those that have run by then
    latest: dict[int, Segment] = {}
    for segment in reversed(graph.segments):
        if not segment.has_backward:
            continue
        needed = graph.backward_inputs(segment)
        before[segment.index] = {*needed, *[each for index in needed for each in before[index]]}
        after = latest.get(segment.stage_index)
        if after is not None:
            assert after.index in before[segment.index]
            assert max(segment.commands) < min(after.commands)
        latest[segment.stage_index] = segment
