"""Replays the lists of all stages together: proof that they end, and what they would cost.

The model: a stage runs its list in order, one action at a time. Sending and posting a receive take no time
on the stage; a message arrives ``latency_s + bytes / bytes_per_s`` after its send. A forward or backward
starts when the stage is free and everything it needs has arrived, a ``W`` after its backward. Memory depends
on the order of a stage's actions alone, not on their times: see :mod:`smp_lite.plan.step.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..collecting import without_gc
from .actions import Action, ActionKind
from .lowering import Schedule
from .recorded_cost import RecordedCost
from .segments import Segment, SegmentGraph
from .work import Work

_Arrival = tuple[ActionKind, int | None, int | None, int]
"""A receive's kind and value; of a value the stage that imports it, and 0; of a gradient the stage that sends
it, and which of its visits does."""


class ScheduleDeadlock(RuntimeError):
    """The lists wait for one another."""


_Cost = Callable[[Action, Segment], float]


class Timing(NamedTuple):
    """When one action ran, in the unit of the costs."""

    action: Action
    start: float
    end: float


_new_timing: Callable[[tuple[Action, float, float]], Timing]
_new_timing = partial(tuple.__new__, Timing)  # type: ignore[assignment]


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


@without_gc()
def simulate(
    schedule: Schedule,
    works: Sequence[Work],
    *,
    cost: _Cost | None = None,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
) -> Simulation:
    """Replays a lowered schedule of complete microbatches.

    Args:
        cost: of each forward, backward and ``W``; None: see :class:`.RecordedCost`.

    Raises:
        ScheduleDeadlock: names the action at which each stage is stuck.
    """
    replay = _Replay(schedule, works, cost or RecordedCost(schedule), latency_s, bytes_per_s)
    replay.run()
    stuck = [
        str(actions[i]) for actions, i in zip(schedule, replay.position, strict=True) if i < len(actions)
    ]
    if stuck:
        raise ScheduleDeadlock(f"the schedule cannot end: stages wait at {', '.join(stuck)}")
    return Simulation(
        timings=tuple(tuple(stage) for stage in replay.timings),
        makespan=max(replay.clock, default=0.0),
        busy=tuple(sum([end - start for _, start, end in stage]) for stage in replay.timings),
    )


_Need = tuple[int, int]
"""(Event, the event instead where the value does not travel)."""
_Run = tuple[int, Segment, tuple[int, ...], float, float]
"""Of a forward, backward or ``W`` its event, its segment, the events that it waits for, and what it costs
whole and split."""


class _Events:
    """What happens in a microbatch as numbers; the same for each microbatch with one graph.

    Events are the ends of forwards, backwards and ``W``, and the arrivals of values and gradients.

    Attributes:
        number: of events.
        needs: for each forward, backward and ``W``, by (kind, stage, visit): its event, its segment, and what
            it waits for.
        arrivals: of values and gradients: the event.
        value_bytes: of the graph.
    """

    def __init__(self, graph: SegmentGraph, cost: _Cost) -> None:
        self.cost = cost
        self.value_bytes = graph.value_bytes
        num_segments = len(graph.segments)
        self.number = 3 * num_segments
        self.arrivals: dict[_Arrival, int] = {}
        self.needs: dict[tuple[ActionKind, int, int], tuple[int, Segment, list[_Need]]] = {}
        for segment in graph.segments:
            index, stage = segment.index, segment.stage_index
            needs = []
            for value in segment.imports:
                source = graph.segments[graph.producer[value]]
                arrival = source.index
                if source.stage_index != stage:
                    arrival = self._arrival((ActionKind.RECV_FORWARD, value, stage, 0))
                needs.append((arrival, source.index))
            self.needs[ActionKind.FORWARD, stage, segment.visit] = (index, segment, needs)
            needs = [(index, index)]
            for value in graph.gradients_taken(segment):
                together: dict[int, int] = {}  # by stage: one message, with whichever of its segments is last
                for source in [graph.segments[i] for i in graph.gradient_sources(segment, value)]:
                    event = num_segments + source.index
                    if source.stage_index != stage:
                        arrival = (ActionKind.RECV_BACKWARD, value, source.stage_index, source.visit)
                        if source.stage_index not in together:
                            together[source.stage_index] = self._arrival(arrival)
                        event = self.arrivals[arrival] = together[source.stage_index]
                    needs.append((event, event))
            backward = num_segments + index
            self.needs[ActionKind.BACKWARD, stage, segment.visit] = (backward, segment, needs)
            needs = [(backward, backward)]
            self.needs[ActionKind.WEIGHT, stage, segment.visit] = (num_segments + backward, segment, needs)
        self.fresh = self.runs(None)

    def _arrival(self, arrival: _Arrival) -> int:
        event = self.arrivals.setdefault(arrival, self.number)
        self.number += event == self.number
        return event

    def runs(self, travelling: set[int] | None) -> dict[tuple[ActionKind, int, int], _Run]:
        """By (kind, stage, visit).

        Args:
            travelling: events of values that arrive; what else is imported is there when it is made. None:
                all arrive.
        """
        found: dict[tuple[ActionKind, int, int], _Run] = {}
        for key, (own, segment, needs) in self.needs.items():
            whole = split = 0.0
            if isinstance(self.cost, RecordedCost):
                whole, split = (self.cost.of(key[0], segment, split=is_split) for is_split in (False, True))
            events = [
                arrival if travelling is None or arrival == made or arrival in travelling else made
                for arrival, made in needs
            ]
            found[key] = (own, segment, tuple(events), whole, split)
        return found


class _Replay:
    """How far each stage has come, and when what has happened did."""

    def __init__(
        self,
        schedule: Schedule,
        works: Sequence[Work],
        cost: _Cost,
        latency_s: float,
        bytes_per_s: float,
    ) -> None:
        self.schedule, self.cost = schedule, cost
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.timings: list[list[Timing]] = [[] for _ in schedule]
        self.position = [0] * len(schedule)
        self.clock = [0.0] * len(schedule)
        of_graph: dict[int, _Events] = {}
        travelling = _travelling(schedule, works)
        # By microbatch: its first event, its events, and what runs.
        self.works: dict[int, tuple[int, _Events, dict[tuple[ActionKind, int, int], _Run]]] = {}
        self.when: list[float | None] = []
        for work in works:
            graph, m = work.graph, work.microbatch_index
            events = of_graph.get(id(graph)) or of_graph.setdefault(id(graph), _Events(graph, cost))
            runs = events.fresh
            if work.forward_done:
                runs = events.runs({events.arrivals[key] for key in travelling[m] if key in events.arrivals})
            first = len(self.when)
            self.works[m] = (first, events, runs)
            self.when += [None] * events.number
            for index in work.forward_done:
                self.when[first + index] = 0.0

    def run(self) -> None:
        """Runs each stage's actions as far as they can, and again when what it waits for has happened."""
        kinds = {id(runs): runs for _, _, runs in self.works.values()}.values()
        works, when, clock, positions = self.works, self.when, self.clock, self.position
        cost, latency_s, bytes_per_s = self.cost, self.latency_s, self.bytes_per_s
        split = None
        if isinstance(cost, RecordedCost):
            are_split = any(took != took_split for runs in kinds for *_, took, took_split in runs.values())
            split = cost.split if are_split else set()
        send_forward, recv_forward = ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD
        send_backward, recv_backward = ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD
        blocked: dict[int, list[int]] = {}  # by event, the stages that wait for it
        begun = [(0, 0.0)] * len(self.schedule)  # needs of the stage's next action that are met, and when
        waiting = list(range(len(self.schedule)))
        while waiting:
            here = waiting.pop()
            actions, timings = self.schedule[here], self.timings[here]
            now, (met, ready) = clock[here], begun[here]
            for position in range(positions[here], len(actions)):
                action = actions[position]
                stage, kind, m, visit, value, peer = action
                if value is None:
                    first, _, runs = works[m]
                    event, segment, needs, took, took_split = runs[kind, stage, visit]
                    for need in needs[met:] if met else needs:
                        time = when[first + need]
                        if time is None:
                            break
                        met += 1
                        if time > ready:
                            ready = time
                    else:
                        if split is None:
                            took = cost(action, segment)
                        elif split and (stage, m, visit) in split:
                            took = took_split
                        start = now if now > ready else ready
                        now = start + took
                        timings.append(_new_timing((action, start, now)))
                        event += first
                        when[event] = now
                        met, ready = 0, 0.0
                        if event in blocked:
                            waiting += blocked.pop(event)
                        continue
                    positions[here], begun[here], clock[here] = position, (met, ready), now
                    blocked.setdefault(first + need, []).append(here)
                    break
                if kind is send_forward:
                    arrival = (recv_forward, value, peer, 0)
                elif kind is send_backward:
                    arrival = (recv_backward, value, stage, visit)
                else:
                    continue
                first, events, _ = works[m]
                found = events.arrivals.get(arrival)
                if found is not None:
                    event = first + found
                    when[event] = now + latency_s + events.value_bytes.get(value, 0) / bytes_per_s
                    if event in blocked:
                        waiting += blocked.pop(event)
            else:
                positions[here], begun[here], clock[here] = len(actions), (0, 0.0), now


def _travelling(schedule: Schedule, works: Sequence[Work]) -> dict[int, set[_Arrival]]:
    """Of each microbatch of which something has run: what is received. Other values are there already, since
    they travelled in an earlier batch of work."""
    found: dict[int, set[_Arrival]] = {work.microbatch_index: set() for work in works if work.forward_done}
    for actions in schedule if found else ():
        for stage, kind, m, _, value, _ in actions:
            if kind is ActionKind.RECV_FORWARD and m in found:
                found[m].add((kind, value, stage, 0))
    return found
