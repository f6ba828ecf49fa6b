"""Lowering that works out for each microbatch anew what travels where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smp_lite.plan.order.schedules import Work
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.lowering import Schedule
from smp_lite.plan.step.segments import Segment, SegmentGraph


def lower(
    order: Sequence[Action],
    works: Sequence[Work],
    num_stages: int,
    *,
    sent: Mapping[int, frozenset[tuple[int, int]]] | None = None,
) -> Schedule:
    """Returns for each stage its list, transfers included.

    Args:
        order: forwards and backwards in one global order, from
            :func:`smp_lite.plan.order.schedules.compute_order`.
        works: the same works.
        num_stages: number of lists.
        sent: per microbatch, (value, stage) pairs that have travelled in an earlier batch of work.
    """
    lists: list[list[Action]] = [[] for _ in range(num_stages)]
    by_microbatch = {work.microbatch_index: work for work in works}
    segments = {
        (work.microbatch_index, s.stage_index, s.visit): s for work in works for s in work.graph.segments
    }
    backward_left: dict[tuple[int, int, int], int] = {}
    for work in works:
        _send_leftovers(work, (sent or {}).get(work.microbatch_index, frozenset()), lists)
        for segment in work.pending_backwards():
            for value in segment.gradient_imports:
                key = (work.microbatch_index, value, segment.stage_index)
                backward_left[key] = backward_left.get(key, 0) + 1
                if value in work.graph.summed_in_turn:
                    backward_left[key] = 1

    for action in order:
        lists[action.stage_index].append(action)
        m = action.microbatch_index
        graph = by_microbatch[m].graph
        segment = segments[m, action.stage_index, action.visit]
        if action.kind is ActionKind.FORWARD:
            for value in segment.exports:
                for stage in graph.remote_stages(value):
                    _send_forward(lists, segment, m, value, stage)
        else:
            for value in segment.gradient_imports:
                key = (m, value, segment.stage_index)
                backward_left[key] -= value not in graph.summed_in_turn
                if not backward_left[key] or value in graph.summed_in_turn:
                    _send_backward(lists, graph, segment, m, value)
    return tuple(tuple(actions) for actions in lists)


def _send_leftovers(work: Work, sent: frozenset[tuple[int, int]], lists: list[list[Action]]) -> None:
    """Values of segments that ran in an earlier batch and are needed elsewhere only now."""
    for segment in work.graph.segments:
        if segment.index not in work.forward_done:
            continue
        for value in segment.exports:
            for stage in work.graph.remote_stages(value):
                if (value, stage) not in sent:
                    _send_forward(lists, segment, work.microbatch_index, value, stage)


def _send_forward(lists: list[list[Action]], segment: Segment, m: int, value: int, stage: int) -> None:
    home = segment.stage_index
    lists[home].append(Action(home, ActionKind.SEND_FORWARD, m, segment.visit, value, stage))
    lists[stage].append(Action(stage, ActionKind.RECV_FORWARD, m, 0, value, home))


def _send_backward(
    lists: list[list[Action]], graph: SegmentGraph, segment: Segment, m: int, value: int
) -> None:
    target = graph.gradient_target(segment, value)
    here, there = segment.stage_index, target.stage_index
    if here != there:
        lists[here].append(Action(here, ActionKind.SEND_BACKWARD, m, segment.visit, value, there))
        lists[there].append(Action(there, ActionKind.RECV_BACKWARD, m, target.visit, value, here))
