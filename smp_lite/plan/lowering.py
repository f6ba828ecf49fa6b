"""The second pass: adds sends and receives to an order of forwards and backwards.

Both ends of a transfer are placed at the moment its producer is placed: the send goes to the end of the
producer's list, the receive to the end of what the consumer's list holds by then. Every list is thus a
piece of one global order in which each transfer's two ends stand side by side, so no two ranks can wait
for each other, whatever the wire does (the argument of ``torch.distributed.pipelining``'s own send/recv
pass). A receive only *posts* the transfer; the consumer waits for it when it runs.

Each cut value travels once to each stage that needs it, and its gradient once back from each such stage,
after the last of that stage's consumers has run backward. A ``W`` sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .actions import Action, ActionKind
from .collecting import without_gc
from .segments import Segment
from .work import Work

Schedule = tuple[tuple[Action, ...], ...]
"""For each stage its ordered list of actions."""


@without_gc()
def lower(
    order: Sequence[Action],
    works: Sequence[Work],
    num_stages: int,
    *,
    sent: Mapping[int, frozenset[tuple[int, int]]] | None = None,
) -> Schedule:
    """Returns for each stage its list, transfers included.

    Args:
        order: forwards, backwards and ``W`` in one global order, from
            :func:`smp_lite.plan.schedules.compute_order`.
        works: the same works.
        num_stages: number of lists.
        sent: per microbatch, (value, stage) pairs that have travelled in an earlier batch of work.
    """
    lists: list[list[Action]] = [[] for _ in range(num_stages)]
    kinds: dict[object, _Travels] = {}
    by_microbatch: dict[int, _Travels] = {}
    for work in works:
        m = work.microbatch_index
        kind = kinds.get(work.kind) or kinds.setdefault(work.kind, _Travels(work))
        by_microbatch[m] = kind
        if kind.left_over:
            travelled = (sent or {}).get(m, frozenset())
            for segment, value, stage in kind.left_over:
                if (value, stage) not in travelled:
                    _send(lists, ActionKind.SEND_FORWARD, m, value, segment.stage_index, stage, segment.visit)

    backward_left: dict[tuple[int, int, int], int] = {}
    for action in order:
        here, action_kind, m, visit, _, _ = action
        lists[here].append(action)
        kind = by_microbatch[m]
        if action_kind is ActionKind.FORWARD:
            for value, stage in kind.forward[here, visit]:
                _send(lists, ActionKind.SEND_FORWARD, m, value, here, stage, visit)
        elif action_kind is ActionKind.BACKWARD:
            for value, producer, num_consumers in kind.backward[here, visit]:
                key = (m, value, here)
                left = backward_left.pop(key, num_consumers) - 1
                if left:
                    backward_left[key] = left
                    continue
                home, home_visit = producer
                _send(lists, ActionKind.SEND_BACKWARD, m, value, here, home, visit, home_visit)
    return tuple(tuple(actions) for actions in lists)


class _Travels:
    """What travels where in a work; the same in each work of one kind.

    Attributes:
        left_over: (segment, value, stage): values of segments that ran in an earlier batch, for other stages.
        forward: for each (stage, visit) the (value, stage) that leave after its forward.
        backward: for each (stage, visit) the values of other stages for which its backward makes a gradient,
            with (stage, visit) of their producer and the number of this stage's segments that do so.
    """

    def __init__(self, work: Work) -> None:
        graph = work.graph
        self.left_over: list[tuple[Segment, int, int]] = []
        self.forward: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.backward: dict[tuple[int, int], list[tuple[int, tuple[int, int], int]]] = {}
        num_consumers: Counter[tuple[int, int]] = Counter()
        pending = work.pending_backwards()
        for segment in pending:
            num_consumers.update((value, segment.stage_index) for value in segment.gradient_imports)
        for segment in graph.segments:
            sends = [(value, stage) for value in segment.exports for stage in graph.remote_stages(value)]
            self.forward[segment.stage_index, segment.visit] = sends
            if segment.index in work.forward_done:
                self.left_over += [(segment, value, stage) for value, stage in sends]
        for segment in pending:
            here = segment.stage_index
            sends_back = self.backward[here, segment.visit] = []
            for value in segment.gradient_imports:
                producer = graph.segments[graph.producer[value]]
                if producer.stage_index != here:
                    home = (producer.stage_index, producer.visit)
                    sends_back.append((value, home, num_consumers[value, here]))


_RECEIVE = {
    ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
}


def _send(
    lists: list[list[Action]],
    kind: ActionKind,
    m: int,
    value: int,
    here: int,
    there: int,
    visit: int,
    visit_there: int = 0,
) -> None:
    """Both ends of a transfer."""
    lists[here].append(Action(here, kind, m, visit, value, there))
    lists[there].append(Action(there, _RECEIVE[kind], m, visit_there, value, here))
