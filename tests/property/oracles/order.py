"""The order of forwards and backwards, found by looking at every waiting task at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smp_lite.plan.order.schedules import BACKWARD_COST_RATIO, Policy, Work
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.segments import Segment, SegmentGraph


@dataclass(frozen=True)
class _Task:
    kind: ActionKind
    microbatch_index: int
    segment: Segment
    cost: float

    @property
    def key(self) -> tuple[ActionKind, int, int]:
        return self.kind, self.microbatch_index, self.segment.index

    def action(self) -> Action:
        return Action(self.segment.stage_index, self.kind, self.microbatch_index, self.segment.visit)


def forward_depth(graph: SegmentGraph) -> dict[int, int]:
    """For each stage: segments on the longest forward path from its first segment to the end."""
    below: dict[int, list[int]] = {}
    for segment in graph.segments:
        for source in graph.forward_inputs(segment):
            below.setdefault(source, []).append(segment.index)
    length: dict[int, int] = {}
    for segment in reversed(graph.segments):
        length[segment.index] = 1 + max((length[i] for i in below.get(segment.index, ())), default=0)
    depth: dict[int, int] = {}
    for segment in graph.segments:
        depth[segment.stage_index] = max(depth.get(segment.stage_index, 0), length[segment.index])
    return depth


def compute_order(works: Sequence[Work], policy: Policy) -> list[Action]:
    """Orders all pending forwards and backwards.

    Returns:
        Forward and backward actions of all stages in order of their simulated start; the entries of one
        stage, in this order, are that stage's list.

    Raises:
        ValueError: ``_only_forward`` was asked for and a microbatch has a backward.
    """
    return _Machine(works, policy).run()


@dataclass
class _Machine:
    works: Sequence[Work]
    policy: Policy
    free_at: dict[int, float] = field(default_factory=dict)
    finish: dict[tuple[ActionKind, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.depth = {work.microbatch_index: forward_depth(work.graph) for work in self.works}
        self.waiting: dict[int, list[_Task]] = {}
        self.needs: dict[tuple[ActionKind, int, int], tuple[tuple[ActionKind, int, int], ...]] = {}
        self.left: dict[int, int] = {}  # tasks left of each microbatch
        self.forwards_left: dict[int, int] = {}  # forwards left on each stage
        # (stage, microbatch) -> tasks left there; started says whether any has run.
        self.left_here: dict[tuple[int, int], int] = {}
        self.started: set[tuple[int, int]] = set()
        self.same_visits = all(work.graph == self.works[0].graph for work in self.works)
        last: dict[tuple[ActionKind, int, int], tuple[ActionKind, int, int]] = {}
        for work in sorted(self.works, key=lambda work: work.microbatch_index):
            self._add(work, last)

    def _add(self, work: Work, last: dict[tuple[ActionKind, int, int], tuple[ActionKind, int, int]]) -> None:
        m = work.microbatch_index
        tasks = [_Task(ActionKind.FORWARD, m, s, s.forward_cost) for s in work.pending_forwards()]
        backwards = work.pending_backwards()
        if backwards and self.policy.pipeline == "_only_forward":
            raise ValueError(
                "pipeline is '_only_forward', but the step calls model.backward(): "
                "remove the call, or set pipeline to 'interleaved' or 'simple'"
            )
        tasks += [
            _Task(ActionKind.BACKWARD, m, s, BACKWARD_COST_RATIO * s.forward_cost)
            for s in reversed(backwards)
        ]
        for segment in work.graph.segments:
            if segment.index in work.forward_done:
                self.finish[ActionKind.FORWARD, m, segment.index] = 0.0
                self.started.add((segment.stage_index, m))
            if segment.index in work.backward_done:
                self.finish[ActionKind.BACKWARD, m, segment.index] = 0.0
        for task in tasks:
            segment = task.segment
            if task.kind is ActionKind.FORWARD:
                needs = [(ActionKind.FORWARD, m, i) for i in work.graph.forward_inputs(segment)]
                self.forwards_left[segment.stage_index] = self.forwards_left.get(segment.stage_index, 0) + 1
            else:
                needs = [(ActionKind.BACKWARD, m, i) for i in work.graph.backward_inputs(segment)]
                needs.append((ActionKind.FORWARD, m, segment.index))
            # The same visit of the previous microbatch comes first.
            by_visit = self.same_visits and segment.stage_index not in work.graph.ordered
            lane = (task.kind, segment.stage_index, segment.visit if by_visit else -1)
            if lane in last:
                needs.append(last[lane])
            last[lane] = task.key
            self.needs[task.key] = tuple(needs)
            self.waiting.setdefault(segment.stage_index, []).append(task)
            here = (segment.stage_index, m)
            self.left_here[here] = self.left_here.get(here, 0) + 1
            self.left[m] = self.left.get(m, 0) + 1

    def run(self) -> list[Action]:
        order: list[Action] = []
        while any(self.waiting.values()):
            start, stage_index, task = min(
                (choice for stage in self.waiting if (choice := self._choice(stage)) is not None),
                key=lambda choice: (choice[0], choice[1]),
            )
            self._place(start, stage_index, task)
            order.append(task.action())
        return order

    def _choice(self, stage_index: int) -> tuple[float, int, _Task] | None:
        """The stage's next start and what it would run then."""
        ready = []
        for task in self.waiting[stage_index]:
            needs = self.needs[task.key]
            if all(need in self.finish for need in needs) and self._admitted(task):
                ready.append((max((self.finish[need] for need in needs), default=0.0), task))
        if not ready:
            return None
        start = max(self.free_at.get(stage_index, 0.0), min(time for time, _ in ready))
        task = min((task for time, task in ready if time <= start), key=self._priority)
        return start, stage_index, task

    def _priority(self, task: _Task) -> tuple[bool, int, int]:
        return task.kind is ActionKind.FORWARD, task.microbatch_index, task.segment.index

    def _admitted(self, task: _Task) -> bool:
        stage_index, m = task.segment.stage_index, task.microbatch_index
        if task.kind is ActionKind.BACKWARD:
            return self.policy.pipeline != "simple" or not self.forwards_left.get(stage_index)
        if self.policy.pipeline != "interleaved" or (stage_index, m) in self.started:
            return True
        if m == min(i for i, left in self.left.items() if left):
            return True
        cap = self.policy.active_microbatches
        in_flight = {i for _, i in self.started if self.left.get(i)}
        if m not in in_flight and len(in_flight) >= cap:
            return False
        if self.policy.optimize == "memory":
            cap = min(cap, self.depth[m][stage_index])
        here = sum(1 for s, i in self.started if s == stage_index and self.left_here.get((s, i)))
        return here < cap

    def _place(self, start: float, stage_index: int, task: _Task) -> None:
        end = start + max(task.cost, 1e-12)
        self.free_at[stage_index] = end
        self.finish[task.key] = end
        self.waiting[stage_index].remove(task)
        here = (stage_index, task.microbatch_index)
        self.started.add(here)
        self.left_here[here] -= 1
        self.left[task.microbatch_index] -= 1
        if task.kind is ActionKind.FORWARD:
            self.forwards_left[stage_index] -= 1
