"""Replays the lists of all stages together: proof that they end, and what they would cost.

The model: a stage runs its list in order, one action at a time. Sending and posting a receive take no time
on the stage; a message arrives ``latency_s + bytes / bytes_per_s`` after its send. A forward or backward
starts when the stage is free and everything it needs has arrived, a ``W`` after its backward. Memory depends
on the order of a stage's actions alone, not on their times: see :mod:`smp_lite.plan.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import COMPUTE_KINDS, Action, ActionKind
from .collecting import without_gc
from .lowering import Schedule
from .segments import Segment, SegmentGraph
from .work import Costs, Work, compute_cost

_Arrival = tuple[ActionKind, int | None, int | None]
"""A receive's kind, the value, the stage that imports the value."""


class ScheduleDeadlock(RuntimeError):
    """The lists wait for one another."""


class Timing(NamedTuple):
    """When one action ran, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What the replay found, times in the unit of the costs.

    Args:
        timings: forwards, backwards and ``W``, by stage.
        makespan: from the start of the first action to the end of the last one, over all stages.
        busy: how long each stage computes; together the work of the step.
    """

    timings: tuple[tuple[Timing, ...], ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def work(self) -> float:
        """What all stages compute together: the time that one stage alone would take."""
        return sum(self.busy)

    @property
    def idle_share(self) -> float:
        """The share of all stages' time in which nothing ran, 0 to 1.

        (S - 1)/(M + S - 1) for S equal stages and M microbatches; the papers call it the bubble.
        """
        total = self.makespan * len(self.busy)
        return 1 - self.work / total if total else 0.0


def recorded_cost(schedule: Schedule, costs: Costs | None = None) -> Callable[[Action, Segment], float]:
    """The default cost: the recorded one, a backward twice the forward, or what its ``W`` leaves of that.

    Args:
        schedule: it says which backwards leave something to a ``W``.
        costs: as measured, instead of the recorded ones.
    """
    split = {
        (stage, m, visit)
        for actions in schedule
        for stage, kind, m, visit, _, _ in actions
        if kind is ActionKind.WEIGHT
    }

    def cost(action: Action, segment: Segment) -> float:
        stage, kind, m, visit, _, _ = action
        return compute_cost(kind, segment, split=bool(split) and (stage, m, visit) in split, costs=costs)

    return cost


@without_gc()
def simulate(
    schedule: Schedule,
    works: Sequence[Work],
    *,
    cost: Callable[[Action, Segment], float] | None = None,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
) -> Simulation:
    """Replays a lowered schedule of complete microbatches.

    Args:
        cost: of each forward, backward and ``W``; None: see :func:`recorded_cost`.

    Raises:
        ScheduleDeadlock: names the action at which each stage is stuck.
    """
    replay = _Replay(schedule, works, cost or recorded_cost(schedule), latency_s, bytes_per_s)
    waiting = list(range(len(schedule)))
    while waiting:
        waiting += replay.go_on(waiting.pop())
    stuck = [
        str(actions[i]) for actions, i in zip(schedule, replay.position, strict=True) if i < len(actions)
    ]
    if stuck:
        raise ScheduleDeadlock(f"the schedule cannot end: stages wait at {', '.join(stuck)}")
    return Simulation(
        timings=tuple(tuple(stage) for stage in replay.timings),
        makespan=max(replay.clock, default=0.0),
        busy=tuple(sum(end - start for _, start, end in stage) for stage in replay.timings),
    )


class _Events:
    """What happens in a microbatch as numbers; the same for each microbatch with one graph.

    Events are the ends of forwards, backwards and ``W``, and the arrivals of values and gradients.

    Attributes:
        number: of events.
        runs: for each forward, backward and ``W``, by (kind, stage, visit): its event, its segment, and the
            events that it waits for: (event, the event instead where the value does not travel).
        forward: of each segment, the event of its forward.
        arrivals: by (a receive's kind, value, stage that imports the value), the event.
    """

    def __init__(self, graph: SegmentGraph) -> None:
        num_segments = len(graph.segments)
        self.number = 3 * num_segments
        self.arrivals: dict[_Arrival, int] = {}
        self.runs: dict[tuple[ActionKind, int, int], tuple[int, Segment, tuple[tuple[int, int], ...]]] = {}
        for segment in graph.segments:
            index, stage = segment.index, segment.stage_index
            needs = []
            for value in segment.imports:
                source = graph.segments[graph.producer[value]]
                arrival = source.index
                if source.stage_index != stage:
                    arrival = self._arrival(ActionKind.RECV_FORWARD, value, stage)
                needs.append((arrival, source.index))
            self.runs[ActionKind.FORWARD, stage, segment.visit] = (index, segment, tuple(needs))
            needs = [(index, index)]
            for value in segment.gradient_exports:
                for consumer in graph.gradient_consumers(value):
                    home = graph.segments[consumer].stage_index
                    event = num_segments + consumer
                    if home != stage:
                        event = self._arrival(ActionKind.RECV_BACKWARD, value, home)
                    needs.append((event, event))
            run = (num_segments + index, segment, tuple(needs))
            self.runs[ActionKind.BACKWARD, stage, segment.visit] = run
            backward = num_segments + index
            run = (num_segments + backward, segment, ((backward, backward),))
            self.runs[ActionKind.WEIGHT, stage, segment.visit] = run

    def _arrival(self, kind: ActionKind, value: int, stage: int) -> int:
        event = self.arrivals.setdefault((kind, value, stage), self.number)
        self.number += event == self.number
        return event


class _Replay:
    """How far each stage has come, and when what has happened did."""

    def __init__(
        self,
        schedule: Schedule,
        works: Sequence[Work],
        cost: Callable[[Action, Segment], float],
        latency_s: float,
        bytes_per_s: float,
    ) -> None:
        self.schedule, self.cost = schedule, cost
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.timings: list[list[Timing]] = [[] for _ in schedule]
        self.position = [0] * len(schedule)
        self.clock = [0.0] * len(schedule)
        self._of_graph: dict[int, _Events] = {}
        self._events: dict[int, tuple[int, _Events, SegmentGraph]] = {}  # by microbatch, with its first one
        self._when: list[float | None] = []
        for work in works:
            graph = work.graph
            if id(graph) not in self._of_graph:
                self._of_graph[id(graph)] = _Events(graph)
            events = self._of_graph[id(graph)]
            first = len(self._when)
            self._events[work.microbatch_index] = (first, events, graph)
            self._when += [None] * events.number
            for index in work.forward_done:
                self._when[first + index] = 0.0
        # A value that travelled in an earlier batch of work is there from the start.
        self._travels = bytearray(len(self._when))
        for actions in schedule:
            for stage, kind, m, _, value, _ in actions:
                if kind is ActionKind.RECV_FORWARD:
                    first, events, _ = self._events[m]
                    event = events.arrivals.get((kind, value, stage))
                    if event is not None:
                        self._travels[first + event] = 1
        self._blocked: dict[int, list[int]] = {}  # by event, the stages that wait for it
        self._begun: dict[int, tuple[int, float]] = {}  # by waiting stage: needs that are met, and when

    def go_on(self, stage: int) -> list[int]:
        """Runs the stage's actions as far as they can; returns the stages that may go on for it."""
        actions, position, now = self.schedule[stage], self.position[stage], self.clock[stage]
        freed: list[int] = []
        when, timings, blocked = self._when, self.timings[stage], self._blocked
        while position < len(actions):
            action = actions[position]
            _, kind, m, visit, value, peer = action
            if kind in COMPUTE_KINDS:
                first, events, _ = self._events[m]
                event, segment, needs = events.runs[kind, stage, visit]
                ready = self._ready_at(stage, first, needs)
                if ready is None:
                    break
                start = max(now, ready)
                now = start + self.cost(action, segment)
                timings.append(Timing(action, start, now))
                when[first + event] = now
                if first + event in blocked:
                    freed += blocked.pop(first + event)
            elif kind is ActionKind.SEND_FORWARD:
                self._sent(m, value, (ActionKind.RECV_FORWARD, value, peer), now, freed)
            elif kind is ActionKind.SEND_BACKWARD:
                self._sent(m, value, (ActionKind.RECV_BACKWARD, value, stage), now, freed)
            position += 1
        self.position[stage], self.clock[stage] = position, now
        return freed

    def _ready_at(self, stage: int, first: int, needs: tuple[tuple[int, int], ...]) -> float | None:
        """When the needs of the stage's next action are met; None if not yet known: the stage is woken."""
        met, ready = self._begun.pop(stage, (0, 0.0))
        for arrival, made in needs[met:] if met else needs:
            event = first + (arrival if arrival == made or self._travels[first + arrival] else made)
            time = self._when[event]
            if time is None:
                self._begun[stage] = (met, ready)
                self._blocked.setdefault(event, []).append(stage)
                return None
            met += 1
            if time > ready:
                ready = time
        return ready

    def _sent(self, m: int, value: int | None, arrival: _Arrival, now: float, freed: list[int]) -> None:
        first, events, graph = self._events[m]
        event = events.arrivals.get(arrival)
        if event is not None:
            size = graph.value_bytes.get(value, 0)
            event += first
            self._when[event] = now + self.latency_s + size / self.bytes_per_s
            if event in self._blocked:
                freed += self._blocked.pop(event)
