"""What graphs of a device hold of a stage's memory, beside what the same step needs without them.

A graph reads and writes memory that stays where it is, and that nobody else can use in between: activations
and gradients of one microbatch, and places for what comes in. What comes out is copied from there. Each
microbatch has its graphs from its forward to the end of its backward, and those that do the same take turns
(:mod:`..runtime.graphs.stage_graphs`): how many there are is read off a stage's list.

Not counted: what matrix products work in, some 8 MiB for each graph, 32 on Hopper.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.step.actions import Action, ActionKind
from ..plan.step.memory import ActionMemory
from ..plan.step.segments import Segment
from ..record.commands.recording import Recording
from ..record.parameters.placement import Placement
from ..runtime.graphs.alike import Likeness
from ..runtime.graphs.allowed import modules_of, why_none, why_not
from ..runtime.graphs.captured import form_of, length_of
from ..runtime.graphs.given import given_to
from ..runtime.graphs.stage_graphs import GRAPHS_VARIABLE, are_wanted
from ..runtime.step.batches import Batch
from ..session import Session

__all__ = ["GraphMemory", "graph_memory", "graph_notes"]


@dataclass
class GraphMemory:
    """Of one stage.

    Attributes:
        num_bytes: what graphs hold for good.
        num_graphs: how many graphs of a forward, each with that of its backward.
        beside: what an action does to other memory, where its segment is a graph.
        not_graphs: why segments are none.
    """

    num_bytes: int = 0
    num_graphs: int = 0
    beside: dict[Action, ActionMemory] = field(default_factory=dict)
    not_graphs: dict[str, None] = field(default_factory=dict)


def graph_memory(
    session: Session,
    batch: Batch,
    recordings: Mapping[int, Recording],
    stage_index: int,
    memory_of: Callable[..., ActionMemory],
) -> GraphMemory:
    """Empty where there are no graphs.

    Args:
        session: as for :func:`..memory_preview.preview_memory`.
        batch: the step's last batch of work.
        recordings: by microbatch.
        stage_index: which stage.
        memory_of: what an action does without graphs; ``new=True``: if it is the first to make gradients.
    """
    found = GraphMemory()
    if not _are_wanted(session) or _refused(session, batch):
        return found
    placement: Placement = session.model.runtime.placement
    segments = {
        (work.microbatch_index, segment.visit): segment
        for work in batch.works
        for segment in work.graph.segments
        if segment.stage_index == stage_index
    }
    free: Counter[Any] = Counter()
    in_use: dict[tuple[int, int], Any] = {}
    for action in batch.schedule[stage_index]:
        where = action.microbatch_index, action.visit
        if where not in segments or action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD):
            continue
        segment, recording = segments[where], recordings[action.microbatch_index]
        forward = action._replace(kind=ActionKind.FORWARD)
        before = memory_of(forward)
        made = _value_bytes(recording, {*segment.exports, *segment.gradient_exports, *segment.roots})
        stays = min(made, before.kept)
        if action.kind is ActionKind.BACKWARD:
            if where not in in_use:
                continue
            free[in_use.pop(where)] += 1
            after = memory_of(action)
            copied = _parameter_bytes(placement, recording, segment)
            copied += _value_bytes(recording, segment.gradient_imports)
            kept = after.kept + before.kept - stays
            found.beside[action] = ActionMemory(kept, after.gradients, max(copied, kept + after.gradients))
            continue
        if (reason := why_not(recording, segment)) is not None:
            found.not_graphs[reason] = None
            continue
        given = given_to(recording, segment)
        key = Likeness(recording, segment), tuple(map(form_of, given))
        if free[key]:
            free[key] -= 1
        else:
            found.num_graphs += 1
            found.num_bytes += _value_bytes(recording, segment.imports)
            found.num_bytes += sum(length_of(tensor) * tensor.element_size() for tensor in given)
            found.num_bytes += before.peak
            if segment.has_backward:
                new = memory_of(action._replace(kind=ActionKind.BACKWARD), new=True)
                found.num_bytes += max(0, before.kept + new.peak - before.peak)
                found.num_bytes += _value_bytes(recording, {*segment.gradient_exports, *segment.roots})
        found.beside[action] = ActionMemory(stays, before.gradients, made)
        if segment.has_backward:
            in_use[where] = key
        else:
            free[key] += 1
    return found


def graph_notes(session: Session, batch: Batch, stages: Sequence[GraphMemory]) -> list[str]:
    """What a reader of the figures should know."""
    if not _are_wanted(session):
        return []
    if reason := _refused(session, batch):
        return [f"{GRAPHS_VARIABLE}=1: no graphs, since {reason}"]
    reasons = dict.fromkeys(reason for stage in stages for reason in stage.not_graphs)
    counts = ", ".join(str(stage.num_graphs) for stage in stages)
    note = (
        f"{GRAPHS_VARIABLE}=1: memory for {counts} graphs of forwards (by stage), and of their backwards, "
        "is counted; what is found only on a device may leave fewer"
    )
    return [f"{note}; no graphs: {'; '.join(reasons)}" if reasons else note]


def _are_wanted(session: Session) -> bool:
    return bool(session.cfg.static_mode) and are_wanted(os.environ)


def _refused(session: Session, batch: Batch) -> str:
    return why_none(
        shared=bool(session.stage_peers) and not session.stage_peers.is_alone,
        sharded=session.cfg.sharded_data_parallel_degree > 1 or bool(session.shard_axes),
        offloaded=session.cfg.offload_activations,
        splits=any(action.kind is ActionKind.WEIGHT for actions in batch.schedule for action in actions),
        wire=None,
    )


def _value_bytes(recording: Recording, values: Iterable[int]) -> int:
    return sum(recording.values[value].meta.num_bytes for value in values)


def _parameter_bytes(placement: Placement, recording: Recording, segment: Segment) -> int:
    """Of the gradients of all parameters that the segment uses."""
    names = [recording.commands[index].parameter for index in segment.commands]
    used = [placement.parameter(name) for name in names if name is not None]
    used += [p for module in modules_of(recording, segment) for p in module.parameters()]
    wanted = {id(p): p for p in used if p.requires_grad}
    return sum(p.numel() * p.element_size() for p in wanted.values())
