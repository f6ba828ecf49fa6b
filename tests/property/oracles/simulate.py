"""The replay that asks every stage in turn whether it can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from smp_lite.plan.order.schedules import Work
from smp_lite.plan.step.actions import COMPUTE_KINDS, Action, ActionKind
from smp_lite.plan.step.lowering import Schedule
from smp_lite.plan.step.segments import Segment, SegmentGraph
from smp_lite.plan.step.simulate import ScheduleDeadlock, Simulation, Timing


def segment_cost(action: Action, segment: Segment) -> float:
    """The recorded cost, a backward twice the forward."""
    return segment.forward_cost * (2.0 if action.kind is ActionKind.BACKWARD else 1.0)


def simulate(
    schedule: Schedule,
    works: Sequence[Work],
    *,
    cost: Callable[[Action, Segment], float] = segment_cost,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
) -> Simulation:
    """Replays a lowered schedule of complete microbatches.

    Raises:
        ScheduleDeadlock: names the action at which each stage is stuck.
    """
    replay = _Replay(schedule, works, latency_s, bytes_per_s)
    timings: list[list[Timing]] = [[] for _ in schedule]
    position = [0] * len(schedule)
    clock = [0.0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for stage_index, actions in enumerate(schedule):
            while position[stage_index] < len(actions):
                action = actions[position[stage_index]]
                ready = replay.ready_at(action)
                if ready is None:
                    break
                position[stage_index] += 1
                progress = True
                if action.kind not in COMPUTE_KINDS:
                    replay.transferred(action, clock[stage_index])
                    continue
                segment, _ = replay.segment(action)
                start = max(clock[stage_index], ready)
                end = clock[stage_index] = start + cost(action, segment)
                timings[stage_index].append(Timing(action, start, end))
                replay.finished(action, end)
    stuck = [str(actions[i]) for actions, i in zip(schedule, position, strict=True) if i < len(actions)]
    if stuck:
        raise ScheduleDeadlock(f"the schedule cannot end: stages wait at {', '.join(stuck)}")
    return Simulation(
        timings=tuple(tuple(stage) for stage in timings),
        makespan=max(clock, default=0.0),
        busy=tuple(sum(t.end - t.start for t in stage) for stage in timings),
    )


class _Replay:
    """What has finished and what has arrived."""

    def __init__(
        self, schedule: Schedule, works: Sequence[Work], latency_s: float, bytes_per_s: float
    ) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.graphs: Mapping[int, SegmentGraph] = {w.microbatch_index: w.graph for w in works}
        self.segments = {
            (w.microbatch_index, s.stage_index, s.visit): s for w in works for s in w.graph.segments
        }
        self.done: dict[tuple[ActionKind, int, int], float] = {
            (ActionKind.FORWARD, w.microbatch_index, i): 0.0 for w in works for i in w.forward_done
        }
        self.arrived: dict[tuple[ActionKind, int, int, int], float] = {}
        # A value that travelled in an earlier batch of work is there from the start.
        self.travels = {
            (ActionKind.RECV_FORWARD, a.microbatch_index, a.value, a.stage_index)
            for actions in schedule
            for a in actions
            if a.kind is ActionKind.RECV_FORWARD
        }

    def segment(self, action: Action) -> tuple[Segment, SegmentGraph]:
        m = action.microbatch_index
        return self.segments[m, action.stage_index, action.visit], self.graphs[m]

    def ready_at(self, action: Action) -> float | None:
        """When the action's needs are met; None if not yet known."""
        if action.kind not in COMPUTE_KINDS:
            return 0.0
        m, stage = action.microbatch_index, action.stage_index
        segment, graph = self.segment(action)
        times: list[float | None] = []
        if action.kind is ActionKind.FORWARD:
            for value in segment.imports:
                source = graph.segments[graph.producer[value]]
                key = (ActionKind.RECV_FORWARD, m, value, stage)
                if source.stage_index == stage or key not in self.travels:
                    times.append(self.done.get((ActionKind.FORWARD, m, source.index)))
                else:
                    times.append(self.arrived.get(key))
        else:
            times.append(self.done.get((ActionKind.FORWARD, m, segment.index)))
            for value in graph.gradients_taken(segment):
                for consumer in graph.gradient_sources(segment, value):
                    home = graph.segments[consumer].stage_index
                    if home == stage:
                        times.append(self.done.get((ActionKind.BACKWARD, m, consumer)))
                    elif value in graph.summed_in_turn:
                        times.append(self.arrived.get((ActionKind.RECV_BACKWARD, m, value, consumer)))
                    else:
                        times.append(self.arrived.get((ActionKind.RECV_BACKWARD, m, value, -1 - home)))
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def transferred(self, action: Action, now: float) -> None:
        m, value, peer = action.microbatch_index, action.value, action.peer
        assert value is not None and peer is not None
        size = self.graphs[m].value_bytes.get(value, 0)
        arrival = now + self.latency_s + size / self.bytes_per_s
        if action.kind is ActionKind.SEND_FORWARD:
            self.arrived[ActionKind.RECV_FORWARD, m, value, peer] = arrival
        elif action.kind is ActionKind.SEND_BACKWARD:
            sender = -1 - action.stage_index
            if value in self.graphs[m].summed_in_turn:
                sender = self.segment(action)[0].index
            self.arrived[ActionKind.RECV_BACKWARD, m, value, sender] = arrival

    def finished(self, action: Action, end: float) -> None:
        segment, _ = self.segment(action)
        self.done[action.kind, action.microbatch_index, segment.index] = end
