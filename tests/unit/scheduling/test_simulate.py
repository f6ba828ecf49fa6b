"""The replay: times, idle share, and deadlocks."""

from __future__ import annotations

import pytest

from smp_lite.plan.order.schedules import Work
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.segments import Segment, build_graph
from smp_lite.plan.step.simulate import ScheduleDeadlock, Timing, simulate
from tests.planning import chain, command, plan


def parse(*lists: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, actions.split())) for actions in lists)


def spans(timings: tuple[Timing, ...]) -> list[tuple[str, float, float]]:
    return [(str(t.action), t.start, t.end) for t in timings]


def test_times_of_a_chain() -> None:
    found = plan(chain([0, 1], costs=[1, 3]), 1).simulate()
    assert spans(found.timings[0]) == [("0F0", 0, 1), ("0B0", 10, 12)]
    assert spans(found.timings[1]) == [("1F0", 1, 4), ("1B0", 4, 10)]
    assert found.makespan == 12
    assert found.busy == (3, 9)
    assert found.work == 12
    assert found.idle_share == 0.5


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_idle_share_of_equal_stages(pipeline: str, num_stages: int, num_microbatches: int) -> None:
    planned = plan(
        chain(range(num_stages)),
        num_microbatches,
        pipeline=pipeline,
        active_microbatches=num_stages,
    )
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert planned.simulate().idle_share == pytest.approx(expected)


def test_message_takes_latency_and_bytes() -> None:
    commands = [command(0, [], 0), command(1, [0], 1)]
    works = [Work(0, build_graph(commands, roots=[1], value_bytes={0: 100, 1: 0}))]
    schedule = plan(works[0].graph, 1).schedule
    found = simulate(schedule, works, latency_s=2.0, bytes_per_s=50.0)
    assert spans(found.timings[1]) == [("1F0", 1 + 4, 6), ("1B0", 6, 8)]
    assert spans(found.timings[0]) == [("0F0", 0, 1), ("0B0", 8 + 4, 14)]


def test_costs_may_be_given() -> None:
    def cost(action: Action, segment: Segment) -> float:
        return 5.0 if action.kind is ActionKind.FORWARD else 7.0

    planned = plan(chain([0, 1]), 1)
    found = simulate(planned.schedule, planned.works, cost=cost)
    assert found.makespan == 24


def test_nothing_takes_no_time() -> None:
    found = simulate((), [])
    assert (found.makespan, found.work, found.idle_share, found.timings) == (0, 0, 0, ())


def test_value_of_an_earlier_batch_is_there() -> None:
    works = [Work(0, chain([0, 1]), forward_done=frozenset({0}))]
    found = simulate(parse("0RECV_B0:v0<1 0B0", "1F0 1B0 1SEND_B0:v0>0"), works)
    assert spans(found.timings[1]) == [("1F0", 0, 1), ("1B0", 1, 3)]


def test_lists_that_wait_for_one_another() -> None:
    """Stage 0 wants the first gradient before its second forward, stage 1 the other way round."""
    works = [Work(m, chain([0, 1])) for m in range(2)]
    schedule = parse(
        "0F0 0SEND_F0:v0>1 0RECV_B0:v0<1 0B0 0F1 0SEND_F1:v0>1 0RECV_B1:v0<1 0B1",
        "1RECV_F0:v0<0 1F0 1RECV_F1:v0<0 1F1 1B0 1SEND_B0:v0>0 1B1 1SEND_B1:v0>0",
    )
    with pytest.raises(ScheduleDeadlock, match="stages wait at 0B0, 1F1"):
        simulate(schedule, works)


def test_message_that_nobody_sends() -> None:
    works = [Work(0, chain([0, 1]))]
    with pytest.raises(ScheduleDeadlock, match="stages wait at 0B0, 1F0"):
        simulate(parse("0F0 0RECV_B0:v0<1 0B0", "1RECV_F0:v0<0 1F0 1B0 1SEND_B0:v0>0"), works)


def test_backward_before_its_forward() -> None:
    with pytest.raises(ScheduleDeadlock, match="stages wait at 0B0"):
        simulate(parse("0B0 0F0"), [Work(0, chain([0]))])
