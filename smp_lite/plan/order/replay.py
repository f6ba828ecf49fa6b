"""Lists of what each stage runs, played in simulated time: one global order, what it takes, what it holds.

Each message takes the same time. ``W`` that the lists leave out run where a stage would wait, the oldest
first, and where a forward would hold more than allowed. An order that exists (each task after all that it
needs) is proof that the lists do not wait for one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .task_table import TaskTable

__all__ = ["Played", "Replays", "shares_of"]

_EPSILON = 1e-9
_MANY_TASKS = 100_000  # whose followers are too many to be kept


@dataclass(frozen=True)
class Played:
    """An order of all tasks.

    Args:
        tasks: in order of their simulated start.
        makespan: in the unit of the costs.
        peaks: of each stage the most that it held, in microbatches.
    """

    tasks: list[int]
    makespan: float
    peaks: tuple[float, ...]


def shares_of(table: TaskTable, *, by_cost: bool = False) -> list[float]:
    """How much of a microbatch each task's forward leaves on its stage, all visits together leaving 1.

    Works are of one kind. A forward without a backward leaves nothing.

    Args:
        by_cost: a visit leaves its share of the stage's forwards; else all leave as much.
    """
    kind = table.kinds[0]
    split, last, _ = kind.ends
    with_backward = {segment.index for segment in kind.segments[:split]}
    totals = [0.0] * len(kind.stages)
    numbers = [0] * len(kind.stages)
    for task in range(split, last):
        if kind.segments[task].index in with_backward:
            totals[kind.groups[task]] += kind.segments[task].forward_cost
            numbers[kind.groups[task]] += 1
    found = []
    for task, segment in enumerate(kind.segments):
        group = kind.groups[task]
        if segment.index not in with_backward:
            found.append(0.0)
        elif by_cost and totals[group] > 0:
            found.append(segment.forward_cost / totals[group])
        else:
            found.append(1 / numbers[group])
    return found


class Replays:
    """Plays lists of the tasks of one table.

    Args:
        table: works of one kind, of which nothing has run.
        shares: see :func:`shares_of`.
        latency: how long after a task its result is on another stage.
    """

    def __init__(self, table: TaskTable, shares: Sequence[float], *, latency: float = 0.0) -> None:
        self.table, self.latency = table, latency
        kind = table.kinds[0]
        split, last, end = kind.ends
        weighted = {kind.segments[task].index for task in range(last, end)}
        own = [
            shares[task] * (split <= task < last)
            - shares[task] * (task >= last or (task < split and segment.index not in weighted))
            for task, segment in enumerate(kind.segments)
        ]
        self.change = [0.0] * table.num_tasks  # what each task adds to what its stage holds
        for offsets in table.offsets:
            for offset, begin, stop in zip(offsets, (0, split, last), kind.ends, strict=True):
                self.change[offset + begin : offset + stop] = own[begin:stop]
        self.followers: Callable[[int], Sequence[int]] = table.followers
        if table.num_tasks <= _MANY_TASKS:
            self.followers = [table.followers(task) for task in range(table.num_tasks)].__getitem__

    def play(
        self, lists: Sequence[Sequence[int]], *, patience: float = 1.0, most_held: float = float("inf")
    ) -> Played | None:
        """Plays the lists; None if they wait for one another.

        Args:
            lists: tasks by stage; of those that are not there all must be ``W``.
            patience: a ``W`` of which at least this share fits runs where the next task is not there yet.
            most_held: before a forward that would make a stage hold more, ``W`` run.
        """
        return _Player(self, lists, patience, most_held + _EPSILON).run()


class _Player:
    """One replay."""

    def __init__(
        self, replays: Replays, lists: Sequence[Sequence[int]], patience: float, most_held: float
    ) -> None:
        self.table, self.change, self.followers = replays.table, replays.change, replays.followers
        self.latency = replays.latency
        self.lists, self.patience, self.most_held = lists, patience, most_held
        self.missing = list(self.table.missing)
        self.ready_at = [0.0] * self.table.num_tasks
        self.heads = [0] * len(lists)
        self.free_at = [0.0] * len(lists)
        self.held = [0.0] * len(lists)
        self.peaks = [0.0] * len(lists)
        self.weights: list[deque[int]] = [deque() for _ in lists]
        self.floating = bytearray(b"\1") * self.table.num_tasks
        for tasks in lists:
            for task in tasks:
                self.floating[task] = 0
        self.queue: list[tuple[float, int]] = []
        self.done: list[int] = []

    def run(self) -> Played | None:
        queue, free_at = self.queue, self.free_at
        queue += [(0.0, stage) for stage in range(len(self.lists))]
        while queue:
            now, stage = heappop(queue)
            if free_at[stage] <= now:
                task = self._next(stage, now)
                if task >= 0:
                    self._place(stage, task, now)
        if len(self.done) < self.table.num_tasks:
            return None
        return Played(self.done, max(free_at, default=0.0), tuple(self.peaks))

    def _next(self, stage: int, now: float) -> int:
        """The stage is free: its next task, a ``W``, or -1: nothing for now."""
        tasks, head, weights = self.lists[stage], self.heads[stage], self.weights[stage]
        if head < len(tasks):
            task = tasks[head]
            full = bool(weights) and self.held[stage] + self.change[task] > self.most_held
            if not full and not self.missing[task]:
                ready = self.ready_at[task]
                if ready <= now:
                    self.heads[stage] = head + 1
                    return task
                if not weights or self.table.cost[weights[0]] * self.patience > ready - now + _EPSILON:
                    heappush(self.queue, (ready, stage))
                    return -1
        return weights.popleft() if weights else -1

    def _place(self, stage: int, task: int, now: float) -> None:
        stage_of, missing, ready_at = self.table.stage, self.missing, self.ready_at
        end = self.free_at[stage] = now + self.table.cost[task]
        self.done.append(task)
        held = self.held[stage] = self.held[stage] + self.change[task]
        if held > self.peaks[stage]:
            self.peaks[stage] = held
        heappush(self.queue, (end, stage))
        for other in self.followers(task):
            there = stage_of[other]
            there_at = end if there == stage else end + self.latency
            if there_at > ready_at[other]:
                ready_at[other] = there_at
            left = missing[other] = missing[other] - 1
            if not left:
                if self.floating[other]:
                    self.weights[there].append(other)
                elif there != stage:
                    heappush(self.queue, (max(ready_at[other], self.free_at[there]), there))
