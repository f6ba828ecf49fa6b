"""Order files of ``torch.distributed.pipelining``, as lists of ours: to replay them in our simulator.

A schedule there writes a file (``_dump_csv``) with a row for each rank and its actions in order: ``0F1`` is
stage 0, forward, microbatch 1; ``I`` the gradients of inputs, ``W`` those of parameters, ``B`` both;
``(0F3;3B1)OVERLAP_F_B`` a forward and a backward whose messages overlap, here one after the other. An empty
entry waits; what makes a rank wait is known here without it. A rank may have several stages: here they are
one stage with several visits, in the order of theirs.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence

from ..collecting import without_gc
from ..step.actions import Action, ActionKind
from ..step.simulate import ScheduleDeadlock
from ..step.work import Work

__all__ = ["merged_order", "read_order_file", "read_rows"]

_KINDS = {
    "F": ActionKind.FORWARD,
    "I": ActionKind.BACKWARD,
    "B": ActionKind.BACKWARD,
    "W": ActionKind.WEIGHT,
}
_ENTRY = re.compile(r"(\d+)([FIBW])(\d+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_order_file(text: str) -> tuple[tuple[Action, ...], ...]:
    """What each rank runs, by the contents of an order file.

    Raises:
        ValueError: names the entry, or the stage that two ranks run.
    """
    return read_rows(csv.reader(text.splitlines()))


def read_rows(rows: Iterable[Sequence[str]]) -> tuple[tuple[Action, ...], ...]:
    """The same of rows that are split already."""
    ranks = [[entry for text in row for entry in _entries(text.strip())] for row in rows]
    home: dict[int, int] = {}
    for rank, entries in enumerate(ranks):
        for stage, _, _ in entries:
            if home.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on rank {home[stage]} and on rank {rank}")
    visit: dict[int, int] = {}
    for rank in range(len(ranks)):
        own = sorted(stage for stage, other in home.items() if other == rank)
        visit |= {stage: number for number, stage in enumerate(own)}
    return tuple(
        tuple(Action(rank, kind, m, visit[stage]) for stage, kind, m in entries)
        for rank, entries in enumerate(ranks)
    )


def _entries(text: str) -> list[tuple[int, ActionKind, int]]:
    if not text or text == "None":
        return []
    pair = _PAIR.fullmatch(text)
    found = []
    for part in pair[1].split(";") if pair else [text]:
        match = _ENTRY.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an action of an order file: there are 0F1, 0I1, 0W1, 0B1 and "
                "(0F3;3B1)OVERLAP_F_B; write the file with format='compute_only'"
            )
        found.append((int(match[1]), _KINDS[match[2]], int(match[3])))
    return found


@without_gc()
def merged_order(lists: Sequence[Sequence[Action]], works: Sequence[Work]) -> list[Action]:
    """One global order of all lists, each action after all that it needs, for :func:`.lowering.lower`.

    Raises:
        ScheduleDeadlock: names the action at which each stage is stuck.
        ValueError: names an action that the works do not have.
    """
    graphs = {work.microbatch_index: work.graph for work in works}
    segments = {id(graph): {(s.stage_index, s.visit): s for s in graph.segments} for graph in graphs.values()}
    done = {
        (kind, work.microbatch_index, index)
        for work in works
        for kind, indices in (
            (ActionKind.FORWARD, work.forward_done),
            (ActionKind.BACKWARD, work.backward_done),
        )
        for index in indices
    }
    blocked: dict[tuple[ActionKind, int, int], list[int]] = {}
    heads = [0] * len(lists)
    order: list[Action] = []
    waiting = list(reversed(range(len(lists))))
    while waiting:
        stage = waiting.pop()
        actions = lists[stage]
        while heads[stage] < len(actions):
            action = actions[heads[stage]]
            _, kind, m, visit, _, _ = action
            graph = graphs.get(m)
            segment = graph and segments[id(graph)].get((stage, visit))
            if graph is None or segment is None:
                raise ValueError(f"{action} is in a list, but microbatch {m} has no such segment")
            if kind is ActionKind.FORWARD:
                needs = [(kind, m, i) for i in graph.forward_inputs(segment)]
            elif kind is ActionKind.BACKWARD:
                needs = [(kind, m, i) for i in graph.backward_inputs(segment)]
                needs.append((ActionKind.FORWARD, m, segment.index))
            else:
                needs = [(ActionKind.BACKWARD, m, segment.index)]
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(stage)
                break
            key = (kind, m, segment.index)
            done.add(key)
            order.append(action)
            heads[stage] += 1
            waiting += blocked.pop(key, ())
    stuck = [str(actions[head]) for actions, head in zip(lists, heads, strict=True) if head < len(actions)]
    if stuck:
        raise ScheduleDeadlock(f"the lists cannot end: stages wait at {', '.join(stuck)}")
    return order
