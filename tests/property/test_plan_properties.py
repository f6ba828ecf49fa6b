"""What holds for orders, lists and their replay whatever was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.order.shapes import shape_of
from smp_lite.plan.step.actions import COMPUTE_KINDS, Action, ActionKind
from smp_lite.plan.step.lowering import lower
from smp_lite.plan.step.segments import SegmentGraph
from smp_lite.plan.step.simulate import simulate
from tests.planning import Planned, chain, plan, plan_works
from tests.planning_strategies import MAX_STAGES, graphs, partly_done, policies


def renumbered(works: Sequence[Work]) -> list[Work]:
    return [Work(m, w.graph, w.forward_done, w.backward_done, w.complete) for m, w in enumerate(works)]


def check_complete_once(planned: Planned, policy: Policy) -> None:
    """Each pending forward, backward and W is in the order once, after what it needs, and runs of
    one visit go by microbatch.
    """
    expected = Counter(
        Action(segment.stage_index, kind, work.microbatch_index, segment.visit)
        for work in planned.works
        for kind, segments in (
            (ActionKind.FORWARD, work.pending_forwards()),
            (ActionKind.BACKWARD, work.pending_backwards()),
            (ActionKind.WEIGHT, work.pending_weights() if policy.splits_backward else []),
        )
        for segment in segments
    )
    assert Counter(planned.order) == expected
    lanes: dict[tuple[ActionKind, int, int], list[int]] = {}
    for action in planned.order:
        lane = (action.kind, action.stage_index, action.visit)
        lanes.setdefault(lane, []).append(action.microbatch_index)
    assert all(lane == sorted(lane) for lane in lanes.values())


def check_lowering(planned: Planned) -> None:
    """The compute order is kept, and what a stage sends another receives in the same order."""
    for stage_index, actions in enumerate(planned.schedule):
        compute = [a for a in actions if a.kind in COMPUTE_KINDS]
        assert compute == [a for a in planned.order if a.stage_index == stage_index]
    for sender in range(len(planned.schedule)):
        for receiver in range(len(planned.schedule)):
            sent = [
                (a.kind is ActionKind.SEND_FORWARD, a.microbatch_index, a.value)
                for a in planned.schedule[sender]
                if a.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD) and a.peer == receiver
            ]
            received = [
                (a.kind is ActionKind.RECV_FORWARD, a.microbatch_index, a.value)
                for a in planned.schedule[receiver]
                if a.kind in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD) and a.peer == sender
            ]
            assert sent == received
            assert not (sent and sender == receiver)


def pending_transfers(works: Sequence[Work]) -> Iterator[tuple[ActionKind, int, int, int]]:
    """(kind, microbatch, value, stage): values to their users, gradients from them."""
    for work in works:
        running = {s.index for s in work.pending_backwards()}
        for value, producer in work.graph.producer.items():
            for stage in work.graph.remote_stages(value):
                yield ActionKind.SEND_FORWARD, work.microbatch_index, value, stage
            if producer in running:
                for stage in gradient_senders(work.graph, value):
                    yield ActionKind.SEND_BACKWARD, work.microbatch_index, value, stage


def gradient_senders(graph: SegmentGraph, value: int) -> Iterable[int]:
    """The stages that send a gradient of the value, as often as they do."""
    consumers = [segment for segment in graph.segments if value in segment.gradient_imports]
    route = [graph.segments[graph.producer[value]], *consumers]
    if value not in graph.summed_in_turn:
        return {s.stage_index for s in consumers} - {route[0].stage_index}
    steps = zip([s.stage_index for s in route], [s.stage_index for s in consumers], strict=False)
    return [stage for target, stage in steps if stage != target]


def transfers(planned: Planned) -> Iterator[tuple[ActionKind, int, int, int]]:
    for action in (a for actions in planned.schedule for a in actions):
        if action.kind in COMPUTE_KINDS:
            continue
        assert action.value is not None
        assert action.peer is not None
        if action.kind is ActionKind.SEND_FORWARD:
            yield action.kind, action.microbatch_index, action.value, action.peer
        elif action.kind is ActionKind.SEND_BACKWARD:
            yield action.kind, action.microbatch_index, action.value, action.stage_index


@settings(max_examples=200)
@given(graphs(), st.integers(1, 5), policies)
def test_equal_microbatches(graph: SegmentGraph, num_microbatches: int, policy: Policy) -> None:
    works = [Work(m, graph) for m in range(num_microbatches)]
    planned = plan_works(works, policy)
    check_complete_once(planned, policy)
    check_lowering(planned)
    assert Counter(transfers(planned)) == Counter(pending_transfers(works))
    found = planned.simulate()  # raises on deadlock
    assert Counter(t.action for stage in found.timings for t in stage) == Counter(planned.order)
    shape = shape_of(graph)
    if policy.pipeline == "interleaved" and (shape is None or shape.num_visits == 1):
        assert most_in_flight(planned) <= policy.active_microbatches


def most_in_flight(planned: Planned) -> int:
    """Most microbatches that, at one point of the order, have begun and not ended."""
    left = Counter(action.microbatch_index for action in planned.order)
    started: set[int] = set()
    most = 0
    for action in planned.order:
        m = action.microbatch_index
        started.add(m)
        most = max(most, sum(left[i] > 0 for i in started))
        left[m] -= 1
    return most


@settings(max_examples=100)
@given(st.lists(partly_done(), min_size=1, max_size=4), policies)
def test_different_and_partly_done_microbatches(parts: list[Work], policy: Policy) -> None:
    works = renumbered(parts)
    planned = plan_works(works, policy)
    check_complete_once(planned, policy)
    check_lowering(planned)
    assert Counter(transfers(planned)) == Counter(pending_transfers(works))
    planned.simulate()  # raises on deadlock


@settings(max_examples=100)
@given(partly_done(), policies)
def test_values_that_have_travelled_stay_where_they_are(work: Work, policy: Policy) -> None:
    graph = work.graph
    sent = {
        (value, graph.segments[consumer].stage_index)
        for value, consumers in graph.consumers.items()
        for consumer in consumers
        if consumer in work.forward_done
    }
    order = compute_order([work], policy)
    schedule = lower(order, [work], MAX_STAGES, sent={0: frozenset(sent)})
    planned = Planned((work,), tuple(order), schedule)
    check_lowering(planned)
    expected = Counter(
        transfer
        for transfer in pending_transfers([work])
        if transfer[0] is ActionKind.SEND_BACKWARD or transfer[2:] not in sent
    )
    assert Counter(transfers(planned)) == expected
    simulate(schedule, [work])  # raises on deadlock


@settings(max_examples=50)
@given(graphs(), st.integers(1, 3))
def test_only_forward_runs_forwards_and_refuses_backwards(graph: SegmentGraph, num_microbatches: int) -> None:
    works = [Work(m, graph) for m in range(num_microbatches)]
    policy = Policy("_only_forward")
    if any(segment.has_backward for segment in graph.segments):
        with pytest.raises(ValueError, match=r"the step calls model\.backward"):
            compute_order(works, policy)
    else:
        planned = plan_works(works, policy)
        check_complete_once(planned, policy)
        planned.simulate()


# Chains


def one_forward_one_backward(stage_index: int, num_stages: int, num_microbatches: int) -> list[str]:
    """The list of one stage as the PipeDream and Megatron-LM papers give it."""
    num_warmup = min(num_stages - 1 - stage_index, num_microbatches)
    names = [f"{stage_index}F{m}" for m in range(num_warmup)]
    for m in range(num_microbatches):
        if num_warmup + m < num_microbatches:
            names.append(f"{stage_index}F{num_warmup + m}")
        names.append(f"{stage_index}B{m}")
    return names


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 3))
def test_interleaved_chain_is_1f1b(num_stages: int, num_microbatches: int, spare: int) -> None:
    planned = plan(chain(range(num_stages)), num_microbatches, active_microbatches=num_stages + spare)
    for stage_index, actions in enumerate(planned.schedule):
        names = [str(action) for action in actions if action.kind in COMPUTE_KINDS]
        assert names == one_forward_one_backward(stage_index, num_stages, num_microbatches)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 10), st.sampled_from(["simple", "interleaved"]))
def test_idle_share_of_a_chain(num_stages: int, num_microbatches: int, pipeline: str) -> None:
    planned = plan(
        chain(range(num_stages)),
        num_microbatches,
        pipeline=pipeline,
        active_microbatches=num_stages,
    )
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert planned.simulate().idle_share == pytest.approx(expected)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 6))
def test_memory_of_a_chain(num_stages: int, num_microbatches: int, active: int) -> None:
    planned = plan(chain(range(num_stages)), num_microbatches, active_microbatches=active)
    assert planned.most_kept() == tuple(
        min(num_stages - stage_index, num_microbatches, active) for stage_index in range(num_stages)
    )


actions = st.builds(
    Action,
    stage_index=st.integers(0, 99),
    kind=st.sampled_from(sorted(COMPUTE_KINDS)),
    microbatch_index=st.integers(0, 999),
    visit=st.integers(0, 9),
    value=st.none(),
    peer=st.none(),
) | st.builds(
    Action,
    stage_index=st.integers(0, 99),
    kind=st.sampled_from(sorted(set(ActionKind) - COMPUTE_KINDS)),
    microbatch_index=st.integers(0, 999),
    visit=st.integers(0, 9),
    value=st.integers(0, 9999),
    peer=st.integers(0, 99),
)


@given(actions)
def test_action_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
