"""The second pass: adds sends and receives to an order of forwards and backwards.

Both ends of a transfer are placed at the moment its producer is placed: the send goes to the end of the
producer's list, the receive to the end of what the consumer's list holds by then. Every list is thus a
piece of one global order in which each transfer's two ends stand side by side, so no two ranks can wait
for each other, whatever the wire does (the argument of ``torch.distributed.pipelining``'s own send/recv
pass). A receive only *posts* the transfer; the consumer waits for it when it runs.

Each cut value travels once to each stage that needs it, and its gradient once back from each such stage,
after the last of that stage's consumers has run backward; where it is summed in turn (:mod:`.segments`), from
consumer to consumer, as often as that is a step to another stage. A ``W`` sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..collecting import without_gc
from .actions import Action, ActionKind, new_action
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
            :func:`smp_lite.plan.order.schedules.compute_order`.
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
                    here, visit = segment.stage_index, segment.visit
                    lists[here].append(Action(here, ActionKind.SEND_FORWARD, m, visit, value, stage))
                    lists[stage].append(Action(stage, ActionKind.RECV_FORWARD, m, 0, value, here))

    append = [actions.append for actions in lists]
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    send_forward, recv_forward = ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD
    send_backward, recv_backward = ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD
    backward_left: dict[tuple[int, int, int], int] = {}
    for action in order:
        here, action_kind, m, visit, _, _ = action
        append[here](action)
        if action_kind is forward:
            for value, stage in by_microbatch[m].forward[here, visit]:
                append[here](new_action((here, send_forward, m, visit, value, stage)))
                append[stage](new_action((stage, recv_forward, m, 0, value, here)))
        elif action_kind is backward:
            for value, (target, target_visit), num_consumers in by_microbatch[m].backward[here, visit]:
                if num_consumers > 1:
                    key = (m, value, here)
                    left = backward_left.pop(key, num_consumers) - 1
                    if left:
                        backward_left[key] = left
                        continue
                append[here](new_action((here, send_backward, m, visit, value, target)))
                append[target](new_action((target, recv_backward, m, target_visit, value, here)))
    return tuple(map(tuple, lists))


class _Travels:
    """What travels where in a work; the same in each work of one kind.

    Attributes:
        left_over: (segment, value, stage): values of segments that ran in an earlier batch, for other stages.
        forward: for each (stage, visit) the (value, stage) that leave after its forward.
        backward: for each (stage, visit) the values for which its backward makes a gradient for another
            stage, with (stage, visit) of the segment that takes it in and the number of this stage's segments
            whose gradients leave together.
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
        num_consumers.update(
            {key: 1 - number for key, number in num_consumers.items() if key[0] in graph.summed_in_turn}
        )
        for segment in graph.segments:
            sends = [(value, stage) for value in segment.exports for stage in graph.remote_stages(value)]
            self.forward[segment.stage_index, segment.visit] = sends
            if segment.index in work.forward_done:
                self.left_over += [(segment, value, stage) for value, stage in sends]
        for segment in pending:
            here = segment.stage_index
            sends_back = self.backward[here, segment.visit] = []
            for value in segment.gradient_imports:
                target = graph.gradient_target(segment, value)
                if target.stage_index != here:
                    place = (target.stage_index, target.visit)
                    sends_back.append((value, place, num_consumers[value, here]))
