"""What holds for segments whatever was recorded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from tests.planning_strategies import RandomRecording, recordings


@pytest.mark.ci
@settings(max_examples=200)
@given(recordings())
def test_every_command_is_in_one_segment_of_its_stage(recording: RandomRecording) -> None:
    commands, graph = recording.commands, recording.graph()
    members = sorted(i for segment in graph.segments for i in segment.commands)
    assert members == list(range(len(commands)))
    visits: Counter[int] = Counter()
    for index, segment in enumerate(graph.segments):
        assert segment.index == index
        assert list(segment.commands) == sorted(segment.commands)
        assert {commands[i].stage_index for i in segment.commands} == {segment.stage_index}
        assert {commands[i].epoch for i in segment.commands} == {segment.epoch}
        assert segment.visit == visits[segment.stage_index]
        visits[segment.stage_index] += 1


@pytest.mark.slow
@settings(max_examples=200)
@given(recordings())
def test_imports_come_from_lower_numbers_and_gradients_from_higher(
    recording: RandomRecording,
) -> None:
    """So neither direction has a circle."""
    commands, graph = recording.commands, recording.graph()
    home = {v: s.index for s in graph.segments for i in s.commands for v in commands[i].outputs}
    for segment in graph.segments:
        outside = {v for i in segment.commands for v in commands[i].inputs if home[v] != segment.index}
        assert set(segment.imports) == outside
        assert all(home[value] < segment.index for value in outside)
        assert all(graph.segments[home[v]].epoch <= segment.epoch for v in outside)
        assert all(value in graph.segments[home[value]].exports for value in outside)
        assert set(segment.gradient_imports) <= outside
        assert set(segment.gradient_exports) <= set(segment.exports)
        assert all(index > segment.index for index in graph.backward_inputs(segment))
    wanted = {v for s in graph.segments for v in s.imports} | recording.needed
    assert wanted == {v for s in graph.segments for v in s.exports}


@pytest.mark.slow
@settings(max_examples=300)
@given(recordings())
def test_gradients_flow_where_links_lead_from_a_root(recording: RandomRecording) -> None:
    """Against a plain search through the commands that knows of no segments."""
    commands, graph = recording.commands, recording.graph()
    links = {v: linked for c in commands for v, linked in zip(c.outputs, c.links, strict=True)}
    reached: set[int] = set()
    to_visit = list(recording.roots)
    while to_visit:
        value = to_visit.pop()
        if value not in reached:
            reached.add(value)
            to_visit.extend(links[value])
    home = {v: s.index for s in graph.segments for i in s.commands for v in commands[i].outputs}
    crossing = {(v, home[out]) for out in reached for v in links[out] if home[v] != home[out]}
    for segment in graph.segments:
        assert {(v, segment.index) for v in segment.gradient_imports} == {
            (v, consumer) for v, consumer in crossing if consumer == segment.index
        }
        assert set(segment.gradient_exports) == {v for v, _ in crossing if home[v] == segment.index}
        assert set(segment.roots) == {v for v in recording.roots if home[v] == segment.index}
        assert segment.has_backward == any(home[value] == segment.index for value in reached)
