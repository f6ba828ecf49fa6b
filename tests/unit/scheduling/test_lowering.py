"""Where sends and receives go, on known shapes."""

from __future__ import annotations

from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.step.lowering import lower
from smp_lite.plan.step.segments import CommandNode, build_graph
from tests.planning import chain, command, plan


def test_chain_sends_on_and_back() -> None:
    assert plan(chain([0, 1]), 2).lists() == [
        "0F0 0SEND_F0:v0>1 0F1 0SEND_F1:v0>1 0RECV_B0:v0<1 0B0 0RECV_B1:v0<1 0B1",
        "1RECV_F0:v0<0 1RECV_F1:v0<0 1F0 1B0 1SEND_B0:v0>0 1F1 1B1 1SEND_B1:v0>0",
    ]


def test_one_stage_sends_nothing() -> None:
    assert plan(chain([0, 0]), 2).lists() == ["0F0 0B0 0F1 0B1"]


def test_value_between_two_segments_of_one_stage_does_not_travel() -> None:
    graph = build_graph([command(0, [], 0), command(1, [0], 1), command(0, [0, 1], 2)], roots=[2])
    assert plan(graph, 1).lists() == [
        "0F0 0SEND_F0:v0>1 0RECV_F0:v1<1 0F0.1 0B0.1 0SEND_B0.1:v1>1 0RECV_B0:v0<1 0B0",
        "1RECV_F0:v0<0 1F0 1SEND_F0:v1>0 1RECV_B0:v1<0 1B0 1SEND_B0:v0>0",
    ]


def test_value_travels_once_to_each_stage_and_its_gradient_once_back() -> None:
    """Two segments of stage 1 use value 0: the gradient leaves after the second one's backward."""
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(2, [1], 2), command(1, [0, 2], 3)],
        roots=[3],
    )
    assert plan(graph, 1).lists() == [
        "0F0 0SEND_F0:v0>1 0RECV_B0:v0<1 0B0",
        "1RECV_F0:v0<0 1F0 1SEND_F0:v1>2 1RECV_F0:v2<2 1F0.1 1B0.1 1SEND_B0.1:v2>2 "
        "1RECV_B0:v1<2 1B0 1SEND_B0:v0>0",
        "2RECV_F0:v1<1 2F0 2SEND_F0:v2>1 2RECV_B0:v2<1 2B0 2SEND_B0:v1>1",
    ]


def test_gradient_that_is_summed_in_turn_goes_from_consumer_to_consumer() -> None:
    """Stages 1, 2 and again 1 use value 0: in one process stage 2's part is added before stage 1's second."""
    graph = build_graph(
        [command(0, [], 0), command(1, [0], 1), command(2, [0, 1], 2), command(1, [0, 2], 3)],
        roots=[3],
    )
    assert plan(graph, 1).lists() == [
        "0F0 0SEND_F0:v0>1 0SEND_F0:v0>2 0RECV_B0:v0<1 0B0",
        "1RECV_F0:v0<0 1F0 1SEND_F0:v1>2 1RECV_F0:v2<2 1F0.1 1B0.1 1SEND_B0.1:v0>2 1SEND_B0.1:v2>2 "
        "1RECV_B0:v0<2 1RECV_B0:v1<2 1B0 1SEND_B0:v0>0",
        "2RECV_F0:v0<0 2RECV_F0:v1<1 2F0 2SEND_F0:v2>1 2RECV_B0:v0<1 2RECV_B0:v2<1 2B0 "
        "2SEND_B0:v0>1 2SEND_B0:v1>1",
    ]


def test_value_without_gradient_sends_nothing_back() -> None:
    graph = build_graph([command(0, [], 0), CommandNode(1, (0,), (1,), links=((),))], roots=[1])
    assert plan(graph, 1).lists() == ["0F0 0SEND_F0:v0>1", "1RECV_F0:v0<0 1F0 1B0"]


def test_value_made_in_an_earlier_batch_is_sent_when_somebody_needs_it() -> None:
    work = Work(0, chain([0, 1]), forward_done=frozenset({0}))
    order = compute_order([work], Policy())
    lists = [" ".join(map(str, actions)) for actions in lower(order, [work], 2)]
    assert lists == [
        "0SEND_F0:v0>1 0RECV_B0:v0<1 0B0",
        "1RECV_F0:v0<0 1F0 1B0 1SEND_B0:v0>0",
    ]


def test_value_sent_in_an_earlier_batch_is_not_sent_again() -> None:
    work = Work(0, chain([0, 1]), forward_done=frozenset({0}))
    order = compute_order([work], Policy())
    schedule = lower(order, [work], 2, sent={0: frozenset({(0, 1)})})
    lists = [" ".join(map(str, actions)) for actions in schedule]
    assert lists == ["0RECV_B0:v0<1 0B0", "1F0 1B0 1SEND_B0:v0>0"]


def test_stage_without_work_has_an_empty_list() -> None:
    work = Work(0, chain([0]))
    assert lower(compute_order([work], Policy()), [work], 2)[1] == ()
