"""The machines of :mod:`.stage_machines` where every microbatch goes along one row of stages.

There what those keep pools and heaps for is two numbers. Microbatches come to a stage in their order, forward
and backward, so there is one forward that can be next, and one backward. As many microbatches are in flight
on a stage as it has run forwards more than backwards; the first stage has those of the whole pipeline, and
when a microbatch is the oldest no other one is in flight before it. So one bound on that number says all that
the policy says, and the order is the same, to the action, in a third of the time. Values may skip stages:
what comes along the row comes last.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ..step.work import Policy
from .task_table import TaskTable

__all__ = ["is_row", "run_row"]

_NEVER = float("inf")


def is_row(table: TaskTable, policy: Policy) -> bool:
    """Whether all works are one row of stages, there and back, and nothing of them has run."""
    if policy.pipeline in ("simple", "_only_forward") or not table.works:
        return False
    work, kind = table.works[0], table.kinds[0]
    if work.forward_done or work.backward_done or any(other is not kind for other in table.kinds):
        return False
    length = len(work.graph.segments)
    if len(kind.stages) != length or kind.ends != (length, 2 * length, 2 * length):
        return False
    followers = [{task for task, _ in following} for following in kind.followers]
    return all(
        length + place in followers[length + place - 1] and place - 1 in followers[place]
        for place in range(1, length)
    )


def run_row(table: TaskTable, policy: Policy) -> list[int]:
    """All tasks in the order of their simulated start; the table is not changed."""
    kind = table.kinds[0]
    length, num_works = len(kind.stages), len(table.works)
    num_backwards = table.num_backwards
    # All lists are by segment. Of equally early tasks the one on the first stage comes first.
    rank = table.stage[:length]
    segment_of = [0] * length
    for segment, place in enumerate(rank):
        segment_of[place] = segment
    backward_cost, forward_cost = kind.costs[:length], kind.costs[length:]
    most = [policy.active_microbatches] * length
    if policy.optimize == "memory":
        most = [min(policy.active_microbatches, kind.depth[stage]) for stage in kind.stages]
    free_at = [0.0] * length
    forwards, backwards = [0] * length, [0] * length  # that have run
    forward_at: list[list[float]] = [[] for _ in range(length)]  # by microbatch, when it may start
    backward_at: list[list[float]] = [[] for _ in range(length)]
    forward_at[0] = [0.0] * num_works
    start_of = [_NEVER] * length
    start_of[0] = 0.0
    is_backward = [False] * length
    last = length - 1
    order: list[int] = []
    queue = [(0.0, rank[0])]
    heapify(queue)
    while queue:
        start, place = heappop(queue)
        here = segment_of[place]
        if start_of[here] != start:
            continue
        start_of[here] = _NEVER
        if is_backward[here]:
            m = backwards[here]
            backwards[here] = m + 1
            order.append(m * length + here)
            end = start + backward_cost[here]
            there, arrived, next_there = here - 1, backward_at, backwards
        else:
            m = forwards[here]
            forwards[here] = m + 1
            order.append(num_backwards + m * length + here)
            end = start + forward_cost[here]
            there, arrived, next_there = here + 1, forward_at, forwards
            if here == last:
                backward_at[here].append(end)
                there = -1
        free_at[here] = end
        if there >= 0:
            arrived[there].append(end)
            looked_at = (here, there) if next_there[there] == m else (here,)
        else:
            looked_at = (here,)
        for segment in looked_at:
            free, found = free_at[segment], _NEVER
            m, times = backwards[segment], backward_at[segment]
            num_in_flight = forwards[segment] - m
            if m < len(times):
                found = times[m]
                if found < free:
                    found = free
                is_backward[segment] = True
            if num_in_flight < most[segment] and found > free:
                m, times = m + num_in_flight, forward_at[segment]
                if m < len(times):
                    time = times[m]
                    if time < free:
                        time = free
                    if time < found:
                        found = time
                        is_backward[segment] = False
            if found != start_of[segment]:
                start_of[segment] = found
                if found < _NEVER:
                    heappush(queue, (found, rank[segment]))
    return order
