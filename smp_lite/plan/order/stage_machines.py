"""The stages as machines in simulated time: who runs what next.

Nothing is looked at twice without need. A task becomes *ready* when the last thing that it needs has run;
it then lies in a pool of its stage. Tasks of one pool are admitted or refused together: those that may
always run, and, where the number of microbatches is bounded, one pool for each bound that counts there and
for whether the microbatch is in flight anywhere. A microbatch that starts, or becomes the oldest, takes its
tasks from one pool to another. A pool is two heaps: what can start now, by rank, and what can start later,
by time. A stage is looked at again when something of that has changed for it, so n tasks take O(n log n).
Where only one task has come to those that may run, it is compared with the one that would be next, no more.

Where backwards leave a ``W`` behind, a stage has two bounds: microbatches whose backwards are still to come,
and microbatches of which anything is still to come, ``W`` too. The first one makes the order of 1F1B, the
second one lets ``W`` wait for as long as the first stage of 1F1B would hold that many anyway (ZB-H1 of Qi et
al. 2023). ``W`` themselves are never held back.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ..step.work import Policy
from .machine_pools import NEVER, Pool, Stage
from .row_machines import is_row, run_row
from .task_table import TaskTable

__all__ = ["run_machines"]


class _Machines:
    """The replay of one table of tasks."""

    def __init__(self, table: TaskTable, policy: Policy) -> None:
        self.table = table
        self.bounded = policy.pipeline not in ("simple", "_only_forward")
        self.backwards_last = policy.pipeline == "simple"
        self.by_depth = policy.optimize == "memory"
        self.active = policy.active_microbatches
        self.most_held = min(self.active, max(table.depth, default=1)) if self.by_depth else self.active
        self.stages = [Stage() for _ in table.stages]
        self.ready_at = [0.0] * table.num_tasks
        self.pool_of: list[Pool | None] = [None] * table.num_tasks
        self.waiting: dict[int, list[int]] = {}  # by group, its tasks in bounded pools
        self.in_flight = sum(b and left > 0 for b, left in zip(table.begun, table.left, strict=True))
        self.oldest = -1
        self.changed: list[int] = []  # stages to look at again
        self.gates: set[int] = set()  # stages where works that are not in flight wait
        self.queue: list[tuple[float, int]] = []
        self.order: list[int] = []

    def run(self) -> list[int]:
        table, stages = self.table, self.stages
        if self.backwards_last:
            for number in table.stage[table.num_backwards : table.first_weight]:
                stages[number].forwards_left += 1
        if any(table.started):
            for group, number in dict(zip(table.group, table.stage, strict=True)).items():
                stages[number].here += table.started[group]
                stages[number].held += table.started[group]
        for stage in stages if self.backwards_last else ():
            if not stage.forwards_left:
                stage.pools.append(stage.backwards)
        self._find_oldest()
        for task, missing in enumerate(table.missing):
            if not missing:
                self._put(task)
        self._look_again()
        self._place_all()
        if len(self.order) < table.num_tasks:
            raise ValueError(f"{table.num_tasks - len(self.order)} tasks need what nobody makes")
        return self.order

    def _place_all(self) -> None:
        """Takes the next task of all, until there is none."""
        # Nothing else here runs as often: names are looked up once.
        table, stages, queue, order = self.table, self.stages, self.queue, self.order
        pool_of, ready_at, changed = self.pool_of, self.ready_at, self.changed
        num_backwards, first_weight = table.num_backwards, table.first_weight
        work_of, group_of, cost_of, kinds = table.work, table.group, table.cost, table.kinds
        left_of, left_here_of, started = table.left, table.left_here, table.started
        missing, all_offsets, next_in_lane = table.missing, table.offsets, table.next_in_lane
        waiting, begun, put = self.waiting, table.begun, self._put
        while queue:
            start, number = heappop(queue)
            stage = stages[number]
            if stage.start != start:
                continue
            task = stage.task
            order.append(task)
            stage.start = NEVER
            pool = pool_of[task]
            assert pool is not None
            heappop(pool.now if pool.now and pool.now[0] == task else pool.future)
            pool_of[task] = None
            end = stage.free_at = start + cost_of[task]
            work, group = work_of[task], group_of[task]
            if task >= first_weight:
                part = 2
                weights_left = table.weights_left[group] = table.weights_left[group] - 1
                stage.held -= not weights_left and not left_here_of[group]
            else:
                part = 0 if task < num_backwards else 1
                if part and self.backwards_last:
                    stage.forwards_left -= 1
                    if not stage.forwards_left:
                        stage.pools.append(stage.backwards)
                left_here = left_here_of[group] = left_here_of[group] - 1
                left = left_of[work] = left_of[work] - 1
                if not started[group]:
                    started[group] = 1
                    stage.here += left_here > 0
                    stage.held += left_here > 0 or table.weights_left[group] > 0
                    tasks = waiting.pop(group, None)
                    if tasks is not None and len(tasks) > 1:
                        # Something of the work runs here for the first time: so may the rest.
                        for other in tasks:
                            if other != task:
                                self._move(other, stage.open)
                    if not begun[work]:
                        self._begin(work)
                elif not left_here:
                    stage.here -= 1
                    stage.held -= not table.weights_left[group]
                if not left:
                    self._leave(work)
            offsets = all_offsets[work]
            for own, part_of_other in kinds[work].followers[task - offsets[part]]:
                other = own + offsets[part_of_other]
                if end > ready_at[other]:
                    ready_at[other] = end
                still = missing[other] = missing[other] - 1
                if not still:
                    put(other)
            other = next_in_lane[task]
            if other >= 0:
                if end > ready_at[other]:
                    ready_at[other] = end
                still = missing[other] = missing[other] - 1
                if not still:
                    put(other)
            if changed:
                changed.append(number)
                self._look_again()
            else:
                self._choose(number, stage)

    # Microbatches in flight -------------------------------------------------------------------------------

    def _begin(self, work: int) -> None:
        """Something of the work runs for the first time."""
        if not self.bounded:
            return
        self.table.begun[work] = True
        self.in_flight += 1
        if self.in_flight == self.active:
            self.changed += self.gates
        for group in self.table.groups[work]:
            for task in self.waiting.get(group, ()):
                self._move(task, self._bounded_pool(task))

    def _leave(self, work: int) -> None:
        """Nothing is left of the work."""
        if self.table.begun[work]:
            self.in_flight -= 1
            if self.in_flight == self.active - 1:
                self.changed += self.gates
        if work == self.oldest:
            self._find_oldest()

    def _find_oldest(self) -> None:
        """The oldest unfinished work is exempt from every bound."""
        left = self.table.left
        self.oldest += 1
        while self.oldest < len(left) and not left[self.oldest]:
            self.oldest += 1
        for group in self.table.groups[self.oldest] if self.oldest < len(left) else ():
            for task in self.waiting.pop(group, ()):
                self._move(task, self.stages[self.table.stage[task]].open)

    # Pools ------------------------------------------------------------------------------------------------

    def _put(self, task: int) -> None:
        """The task has all that it needs."""
        table = self.table
        number = table.stage[task]
        stage = self.stages[number]
        if task < table.num_backwards:
            pool = stage.backwards if self.backwards_last else stage.open
            admitted = not self.backwards_last or not stage.forwards_left
        elif task >= table.first_weight or not self.bounded:
            pool, admitted = stage.open, True
        else:
            work, group = table.work[task], table.group[task]
            if work == self.oldest or table.started[group]:
                pool, admitted = stage.open, True
            else:
                tasks = self.waiting.get(group)
                if tasks is None:
                    self.waiting[group] = [task]
                else:
                    tasks.append(task)
                pool = self._bounded_pool(task)
                admitted = self._admits(stage, pool)
        self.pool_of[task] = pool
        start, free_at = self.ready_at[task], stage.free_at
        if start <= free_at:
            start = free_at
            heappush(pool.now, task)
        else:
            heappush(pool.future, (start, task))
        # A stage that is in the middle of a change is looked at as a whole after it.
        if admitted and (start < stage.start or (start == stage.start and task < stage.task)):
            if start != stage.start:
                stage.start = start
                heappush(self.queue, (start, number))
            stage.task = task

    def _admits(self, stage: Stage, pool: Pool) -> bool:
        """Whether tasks of the pool may start."""
        if pool.cap == NEVER:
            return True
        return (
            stage.here < pool.cap
            and (pool.begun or self.in_flight < self.active)
            and stage.held < self.most_held
        )

    def _bounded_pool(self, task: int) -> Pool:
        table = self.table
        number = table.stage[task]
        begun = table.begun[table.work[task]]
        cap = min(self.active, table.depth[table.group[task]]) if self.by_depth else self.active
        stage = self.stages[number]
        pools = stage.bounded[begun]
        pool = pools.get(cap)
        if pool is None:
            pool = pools[cap] = Pool(begun, cap)
            stage.pools.append(pool)
            if not begun:
                self.gates.add(number)
        return pool

    def _move(self, task: int, pool: Pool) -> None:
        """Into a pool, and out of the one that it was in: what heaps say of others counts no more."""
        number = self.table.stage[task]
        self.pool_of[task] = pool
        time = self.ready_at[task]
        if time <= self.stages[number].free_at:
            heappush(pool.now, task)
        else:
            heappush(pool.future, (time, task))
        self.changed.append(number)

    # Choices ----------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Finds the next task of each stage for which something has changed."""
        for number in set(self.changed):
            self._choose(number, self.stages[number])
        self.changed.clear()

    def _choose(self, number: int, stage: Stage) -> None:
        now = -1
        later: tuple[float, int] | None = None
        pool_of, free_at, here = self.pool_of, stage.free_at, stage.here
        full = stage.held >= self.most_held
        may_begin = self.in_flight < self.active
        for pool in stage.pools:
            cap = pool.cap
            if cap < NEVER and (full or here >= cap or not (may_begin or pool.begun)):
                continue
            ready, future = pool.now, pool.future
            # What has left the pool is dropped, what can start by now is sorted by rank.
            while future and (future[0][0] <= free_at or pool_of[future[0][1]] is not pool):
                task = heappop(future)[1]
                if pool_of[task] is pool:
                    heappush(ready, task)
            while ready and pool_of[ready[0]] is not pool:
                heappop(ready)
            if ready and (now < 0 or ready[0] < now):
                now = ready[0]
            if future and (later is None or future[0] < later):
                later = future[0]
        if now >= 0:
            start, stage.task = free_at, now
        elif later is not None:
            start, stage.task = later
        else:
            start = NEVER
        if start != stage.start:
            stage.start = start
            if start < NEVER:
                heappush(self.queue, (start, number))


def run_machines(table: TaskTable, policy: Policy) -> list[int]:
    """All tasks in the order of their simulated start, see :func:`.schedules.compute_order`."""
    if is_row(table, policy):
        return run_row(table, policy)
    return _Machines(table, policy).run()
