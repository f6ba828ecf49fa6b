"""Of several orders of the same work the one that takes least time: a pure function, the same on all ranks.

Where a step's microbatches are all alike and nothing of them has run, a policy is a bound on what stages
hold, and whatever order keeps it may be taken. The candidates: those of the literature, where the stages'
shape is theirs (:mod:`.constructions`), those of the greedy machines (:mod:`.stage_machines`), and both
with ``W`` put where a stage would wait. Each is played with the recorded costs (:mod:`.replay`).

What a stage holds is counted in microbatches: of a stage that is visited v times, each visit that has run
forward, and not yet backward with its ``W``, counts 1/v. 1F1B holds on no stage more than there are stages,
which is the bound of ``zero_bubble`` and ``zero_bubble_v``; what Megatron-LM's order holds, P + (P-1)/v, is
the one of ``interleaved_virtual``, and of ``interleaved`` where stages are visited again; with
``optimize="speed"`` it is ``active_microbatches``, which is the most in any case.

1F1B with each ``W`` directly after its backward is always a candidate, and where stages are visited once it
keeps every bound, so nothing is slower than 1F1B. Where the stages' shape has no name (branches; the head of
tied embeddings, which is a small second visit of the first stage) a visit counts as its share of the stage's
forwards, and what 1F1B holds there is allowed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..step.actions import Action, ActionKind
from ..step.work import Costs, Policy, Work
from .constructions import Entry, interleaved, zero_bubble_h1, zero_bubble_v
from .replay import Played, Replays, shares_of
from .shapes import Shape, shape_of
from .stage_machines import run_machines
from .task_table import TaskTable

__all__ = ["chosen_order"]

_BETTER = 1 - 1e-9
_EPSILON = 1e-9
_SIZES = (20_000, 4_000)
"""Of larger tables fewer candidates are tried, so that large steps are planned in time."""


def chosen_order(
    works: Sequence[Work], policy: Policy, costs: Costs | None = None, latency: float = 0.0
) -> list[Action] | None:
    """The best order, or None where the greedy machines have no alternative.

    Args:
        works, policy: see :func:`smp_lite.plan.order.schedules.compute_order`.
        costs: None: the recorded ones.
        latency: of a message, in the unit of the costs.
    """
    if policy.pipeline in ("simple", "_only_forward") or not _alike(works):
        return None
    shape = shape_of(works[0].graph)
    again = shape is not None and shape.num_visits > 1
    if policy.pipeline == "interleaved" and not again:
        return None
    return _Choice(works, policy, shape, costs, latency).run()


def _alike(works: Sequence[Work]) -> bool:
    first = works[0] if works else None
    return first is not None and all(
        work.complete
        and not work.forward_done
        and not work.backward_done
        and (work.graph is first.graph or work.graph == first.graph)
        for work in works
    )


class _Choice:
    """The candidates of one step."""

    def __init__(
        self,
        works: Sequence[Work],
        policy: Policy,
        shape: Shape | None,
        costs: Costs | None = None,
        latency: float = 0.0,
    ) -> None:
        graph = works[0].graph
        works = [Work(work.microbatch_index, graph) for work in works]
        self.works, self.policy, self.shape = works, policy, shape
        self.costs = costs
        self.num_microbatches = len(works)
        self.table = TaskTable(works, splits=policy.splits_backward, costs=costs)
        self.replays = Replays(self.table, shares_of(self.table, by_cost=shape is None), latency=latency)
        self.bound = self._bound()
        self.has_weights = self.table.first_weight < self.table.num_tasks

    def run(self) -> list[Action]:
        base = self._greedy(splits=False)
        best = one_f_one_b = self.replays.play(self._weights_at_once(base))
        assert one_f_one_b is not None, "the greedy machines' order exists"
        if self.shape is None:
            self.bound = max(self.bound, *one_f_one_b.peaks)
        elif self.policy.pipeline != "interleaved" and not self._fits(one_f_one_b):
            best = None
        least = self._least_makespan()
        for lists, most_held, patience in self._candidates(base):
            if best is not None and best.makespan <= least:
                break
            played = self.replays.play(lists, most_held=most_held, patience=patience)
            if played is not None and self._fits(played) and (best is None or _better(played, best)):
                best = played
        return self.table.actions((best or one_f_one_b).tasks)

    def _fits(self, played: Played) -> bool:
        return max(played.peaks, default=0.0) <= self.bound + _EPSILON

    def _least_makespan(self) -> float:
        """No order is faster: each stage waits for its first task and then does all of its work."""
        table = self.table
        busy = [0.0] * len(table.stages)
        for stage, cost in zip(table.stage, table.cost, strict=True):
            busy[stage] += cost
        kind = table.kinds[0]
        split, last, _ = kind.ends
        ends = [0.0] * len(kind.segments)
        starts = [float("inf")] * len(table.stages)
        begin = [0.0] * len(kind.segments)
        for task in range(split, last):
            ends[task] = begin[task] + kind.costs[task]
            stage = table.stages.index(kind.names[task][0])
            starts[stage] = min(starts[stage], begin[task])
            for other, _ in kind.followers[task]:
                begin[other] = max(begin[other], ends[task])
        return max(s + b for s, b in zip(starts, busy, strict=True)) * (1 + _EPSILON)

    # The bound --------------------------------------------------------------------------------------------

    def _bound(self) -> float:
        active = float(self.policy.active_microbatches)
        if self.policy.optimize == "speed":
            return active
        shape = self.shape
        if shape is None:  # and what 1F1B holds
            return min(active, 1.0)
        num_stages, num_visits = len(shape.stages), shape.num_visits
        more = (num_stages - 1) / num_visits if num_visits > 1 and not self.policy.splits_backward else 0.0
        return min(active, num_stages + more)

    # Candidates -------------------------------------------------------------------------------------------

    def _candidates(self, base: list[list[int]]) -> Iterator[tuple[list[list[int]], float, float]]:
        """Lists of tasks by stage, what they may hold, and the patience of ``W``."""
        never = float("inf")
        effort = sum(self.table.num_tasks <= size for size in _SIZES)
        constructed = list(self._constructed())
        for lists in constructed:
            yield lists, never, 1.0
        if not self.has_weights:
            return
        without = [[self._without_weights(tasks) for tasks in lists] for lists in constructed[::-1]]
        if self.shape is None or self.shape.num_visits == 1:
            without.insert(0, base)
        if effort == 0:
            without = without[:1]
        if effort > 1:
            without.append(self._greedy(splits=True))
        for lists in without:
            for patience in (1.0, 0.5, 0.0)[: max(1, 2 * effort - 1)]:
                yield lists, self.bound, patience
        if effort > 0:
            yield self._greedy(splits=True, weights=True), never, 1.0

    def _constructed(self) -> Iterator[list[list[int]]]:
        shape, num_microbatches = self.shape, self.num_microbatches
        if shape is None:
            return
        num_stages = len(shape.stages)
        if shape.num_visits == 1:
            if self.has_weights:
                yield self._tasks(shape, zero_bubble_h1(num_stages, num_microbatches))
            return
        if shape.is_v:
            yield self._tasks(shape, zero_bubble_v(num_stages, num_microbatches))
            return
        for lead in (2, 1):
            for short_first in (True, False)[num_microbatches % num_stages == 0 :]:
                lists = interleaved(
                    num_stages, num_microbatches, shape.num_visits, lead=lead, short_first=short_first
                )
                yield self._weights_at_once(self._tasks(shape, lists))

    def _tasks(self, shape: Shape, lists: Sequence[Sequence[Entry]]) -> list[list[int]]:
        """The tasks that these entries are, by stage; what has no backward or no ``W`` is left out."""
        table = self.table
        kind = table.kinds[0]
        number = {name: own for own, name in enumerate(kind.names)}
        found: list[list[int]] = [[] for _ in table.stages]
        for stage, entries in zip(shape.stages, lists, strict=True):
            tasks = found[table.stages.index(stage)]
            # A V's last stage may have one segment for both visits: it runs when the first of the two would.
            one = shape.is_v and (stage, ActionKind.FORWARD, 1) not in number
            if one:
                entries = dict.fromkeys([(what, 0, m) for what, _, m in entries])
            for what, visit, m in entries:
                own = number.get((stage, what, visit))
                if own is not None:
                    part = 0 if what is ActionKind.BACKWARD else 1 if what is ActionKind.FORWARD else 2
                    tasks.append(own + table.offsets[m][part])
        return found

    def _greedy(self, *, splits: bool, weights: bool = False) -> list[list[int]]:
        """What the greedy machines do, tasks by stage, with or without ``W``."""
        policy = self.policy
        if not splits:
            policy = Policy("interleaved", policy.optimize, policy.active_microbatches)
        table = TaskTable(self.works, splits=splits, costs=self.costs)
        first_weight = self.table.first_weight
        found: list[list[int]] = [[] for _ in table.stages]
        # Backwards and forwards have the same numbers whether or not there are W.
        for task in run_machines(table, policy):
            if weights or task < first_weight:
                found[table.stage[task]].append(task)
        return found

    def _weights_at_once(self, lists: Sequence[Sequence[int]]) -> list[list[int]]:
        if not self.has_weights:
            return [list(tasks) for tasks in lists]
        table = self.table
        weight_of = {
            name[::2]: own for own, name in enumerate(table.kinds[0].names) if name[1] is ActionKind.WEIGHT
        }
        names = table.kinds[0].names
        found = []
        for tasks in lists:
            new = []
            for task in tasks:
                new.append(task)
                if task < table.num_backwards:
                    offsets = table.offsets[table.work[task]]
                    own = weight_of.get(names[task - offsets[0]][::2])
                    if own is not None:
                        new.append(own + offsets[2])
            found.append(new)
        return found

    def _without_weights(self, tasks: Sequence[int]) -> list[int]:
        return [task for task in tasks if task < self.table.first_weight]


def _better(one: Played, other: Played) -> bool:
    """Clearly faster; or as fast and holding less."""
    if one.makespan < other.makespan * _BETTER:
        return True
    return one.makespan * _BETTER <= other.makespan and max(one.peaks) < max(other.peaks) - _EPSILON
