"""The forwards, backwards and ``W`` of all works as numbers, and what waits for what.

Works of one kind differ in their microbatch alone, so what a kind's tasks are and need is worked out once
(:class:`_Kind`); a work is a kind and three offsets. A task's number is its rank: backwards before forwards
before ``W``, then by microbatch, then by segment. So the best of several ready tasks is the smallest number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..step.actions import Action, ActionKind, new_action
from ..step.segments import Segment, SegmentGraph
from ..step.work import Costs, Work, compute_cost

__all__ = ["TaskTable", "forward_depth"]


def forward_depth(graph: SegmentGraph) -> dict[int, int]:
    """For each stage: segments on the longest forward path from its first segment to the end."""
    length = [1] * len(graph.segments)
    depth: dict[int, int] = {}
    for segment in reversed(graph.segments):
        # All that need this one come after it.
        for source in graph.forward_inputs(segment):
            length[source] = max(length[source], 1 + length[segment.index])
    for segment in graph.segments:
        depth[segment.stage_index] = max(depth.get(segment.stage_index, 0), length[segment.index])
    return depth


class _Kind:
    """The tasks of one work, numbered within it: first those of the backwards, then the forwards, then ``W``.

    Attributes:
        ends: where each of the three parts ends.
        segments: of each task.
        names: of each task its stage, what it does there, and the visit.
        chain_order: the tasks in the order in which they come in their lanes.
        groups: of each task, its stage's number within the work.
        stages: of each group, the stage.
        pending: of each group, its number of forwards and backwards.
        pending_weights: of each group, its number of ``W``.
        begun: groups in which something has run already.
        missing: of each task, how many tasks it needs.
        followers: of each task, those that need it, each with its part.
        depth: by stage, see :func:`forward_depth`.
    """

    def __init__(self, work: Work, splits: bool, costs: Costs | None) -> None:
        graph = work.graph
        backwards, forwards = work.pending_backwards(), work.pending_forwards()
        weights = work.pending_weights() if splits else []
        self.segments: list[Segment] = [*backwards, *forwards, *weights]
        num_tasks = len(self.segments)
        split = len(backwards)
        last = split + len(forwards)
        self.ends = (split, last, num_tasks)
        what = (
            [ActionKind.BACKWARD] * split
            + [ActionKind.FORWARD] * len(forwards)
            + [ActionKind.WEIGHT] * len(weights)
        )
        self.names = [(s.stage_index, kind, s.visit) for s, kind in zip(self.segments, what, strict=True)]
        self.chain_order = [
            *range(split, last),
            *reversed(range(split)),
            *reversed(range(last, num_tasks)),
        ]
        self.stages = list(dict.fromkeys(s.stage_index for s in graph.segments))
        group_of = {stage: group for group, stage in enumerate(self.stages)}
        self.groups = [group_of[s.stage_index] for s in self.segments]
        self.pending = [0] * len(self.stages)
        self.pending_weights = [0] * len(self.stages)
        for task, group in enumerate(self.groups):
            if task < last:
                self.pending[group] += 1
            else:
                self.pending_weights[group] += 1
        self.begun = sorted({group_of[graph.segments[i].stage_index] for i in work.forward_done})
        self.costs = [
            max(compute_cost(kind, s, split=splits, costs=costs), 1e-12)
            for s, kind in zip(self.segments, what, strict=True)
        ]
        backward_of = {s.index: i for i, s in enumerate(backwards)}
        forward_of = {s.index: i for i, s in enumerate(forwards, start=split)}
        self.missing = [0] * num_tasks
        self.followers: list[list[tuple[int, int]]] = [[] for _ in range(num_tasks)]
        for task, segment in enumerate(self.segments):
            if task >= last:
                needs = [(segment.index, backward_of, work.backward_done)]
            elif task >= split:
                needs = [(i, forward_of, work.forward_done) for i in graph.forward_inputs(segment)]
            else:
                needs = [(i, backward_of, work.backward_done) for i in graph.backward_inputs(segment)]
                needs.append((segment.index, forward_of, work.forward_done))
            for index, number_of, done in needs:
                if index in done:
                    continue
                self.missing[task] += 1
                if index in number_of:
                    self.followers[number_of[index]].append((task, _part(self, task)))
        self.depth = forward_depth(graph)


class TaskTable:
    """All tasks of some works.

    Attributes:
        stages: the stages in order; elsewhere a stage is its place here.
        num_tasks, num_backwards, first_weight: tasks below ``num_backwards`` are backwards, those from
            ``first_weight`` on are ``W``.
        stage: of each task.
        work: of each task, the place of its work among them by microbatch.
        group: of each task: the tasks of one work on one stage.
        cost: of each task.
        missing: of each task, how many tasks it waits for.
        next_in_lane: of each task, the same visit of the next microbatch; -1: none.
        left: of each work, its number of forwards and backwards.
        left_here, weights_left, started: of each group, its number of forwards and backwards, that of ``W``,
            and whether anything of it has run.
        begun: of each work, whether anything of it has run.
        depth: of each group, see :func:`forward_depth`.
        groups: of each work.
    """

    def __init__(self, works: Sequence[Work], *, splits: bool = False, costs: Costs | None = None) -> None:
        self.works = sorted(works, key=lambda work: work.microbatch_index)
        kinds: dict[object, _Kind] = {}
        self.kinds = [
            kinds.get(w.kind) or kinds.setdefault(w.kind, _Kind(w, splits, costs)) for w in self.works
        ]
        self.stages = sorted({stage for kind in kinds.values() for stage in kind.stages})
        self._place = {stage: place for place, stage in enumerate(self.stages)}
        self.num_backwards = sum(kind.ends[0] for kind in self.kinds)
        self.first_weight = sum(kind.ends[1] for kind in self.kinds)
        self.num_tasks = sum(len(kind.segments) for kind in self.kinds)
        self.stage = [0] * self.num_tasks
        self.work = [0] * self.num_tasks
        self.group = [0] * self.num_tasks
        self.cost = [0.0] * self.num_tasks
        self.missing = [0] * self.num_tasks
        self.next_in_lane = [-1] * self.num_tasks
        self.offsets: list[tuple[int, int, int]] = []  # of each work, from a kind's task to its own, by part
        self.left = [kind.ends[1] for kind in self.kinds]
        self.left_here: list[int] = []
        self.weights_left: list[int] = []
        self.started = bytearray()
        self.begun = [bool(kind.begun) for kind in self.kinds]
        self.depth: list[int] = []
        self.groups: list[range] = []
        self._fill()
        self._fill_lanes()

    def _fill(self) -> None:
        firsts = [0, self.num_backwards, self.first_weight]
        for number, kind in enumerate(self.kinds):
            places = [self._place[stage] for stage in kind.stages]
            stages = [places[group] for group in kind.groups]
            first_group = len(self.left_here)
            groups = [first_group + group for group in kind.groups]
            offsets = []
            begin = 0
            for part, end in enumerate(kind.ends):
                here, own = slice(firsts[part], firsts[part] + end - begin), slice(begin, end)
                offsets.append(firsts[part] - begin)
                firsts[part] += end - begin
                begin = end
                self.stage[here] = stages[own]
                self.group[here] = groups[own]
                self.cost[here] = kind.costs[own]
                self.missing[here] = kind.missing[own]
                self.work[here] = [number] * (own.stop - own.start)
            self.left_here += kind.pending
            self.weights_left += kind.pending_weights
            started = bytearray(len(places))
            for group in kind.begun:
                started[group] = 1
            self.started += started
            self.groups.append(range(first_group, first_group + len(places)))
            self.depth += [kind.depth[stage] for stage in kind.stages]
            self.offsets.append((offsets[0], offsets[1], offsets[2]))

    def _fill_lanes(self) -> None:
        """The same visit of the previous microbatch comes first."""
        same_visits = all(work.graph == self.works[0].graph for work in self.works)
        if len({id(kind) for kind in self.kinds}) == 1 and self._fill_equal_lanes(same_visits):
            return
        last: dict[tuple[int, int, int], int] = {}
        lanes: dict[int, list[tuple[int, int, tuple[int, int, int]]]] = {}
        for number, (work, kind) in enumerate(zip(self.works, self.kinds, strict=True)):
            if id(kind) not in lanes:
                lanes[id(kind)] = [
                    (task, _part(kind, task), _lane(kind, task, same_visits, work.graph.ordered))
                    for task in kind.chain_order
                ]
            offsets = self.offsets[number]
            for own, part, lane in lanes[id(kind)]:
                task = own + offsets[part]
                if lane in last:
                    self.next_in_lane[last[lane]] = task
                    self.missing[task] += 1
                last[lane] = task

    def _fill_equal_lanes(self, same_visits: bool) -> bool:
        """The same for works of one kind with as many lanes as tasks; False: they have fewer."""
        kind, ordered = self.kinds[0], self.works[0].graph.ordered
        lanes = {_lane(kind, task, same_visits, ordered) for task in kind.chain_order}
        if len(lanes) < len(kind.chain_order):
            return False
        missing = [number + 1 for number in kind.missing]
        for before, after in pairwise(self.offsets):
            begin = 0
            for part, end in enumerate(kind.ends):
                first, second = before[part], after[part]
                self.next_in_lane[first + begin : first + end] = range(second + begin, second + end)
                self.missing[second + begin : second + end] = missing[begin:end]
                begin = end
        return True

    def followers(self, task: int) -> list[int]:
        """The tasks that need this one."""
        number = self.work[task]
        offsets = self.offsets[number]
        own = task - offsets[0 if task < self.num_backwards else 1 if task < self.first_weight else 2]
        found = [other + offsets[part] for other, part in self.kinds[number].followers[own]]
        if self.next_in_lane[task] >= 0:
            found.append(self.next_in_lane[task])
        return found

    def actions(self, tasks: Iterable[int]) -> list[Action]:
        """The tasks as the schedule names them."""
        numbers = [work.microbatch_index for work in self.works]
        names = [kind.names for kind in self.kinds]
        offsets, of_task = self.offsets, self.work
        num_backwards, first_weight = self.num_backwards, self.first_weight
        found = []
        for task in tasks:
            work = of_task[task]
            part = 0 if task < num_backwards else 1 if task < first_weight else 2
            stage, kind, visit = names[work][task - offsets[work][part]]
            found.append(new_action((stage, kind, numbers[work], visit, None, None)))
        return found


def _part(kind: _Kind, task: int) -> int:
    split, last, _ = kind.ends
    return 0 if task < split else 1 if task < last else 2


def _lane(kind: _Kind, task: int, same_visits: bool, ordered: frozenset[int]) -> tuple[int, int, int]:
    segment = kind.segments[task]
    by_visit = same_visits and segment.stage_index not in ordered
    return _part(kind, task), segment.stage_index, segment.visit if by_visit else -1
