"""What graphs of a device hold of a stage's memory, beside what the same step needs without them.

A graph reads and writes memory that stays where it is. So for good there are places for what comes in, what
goes out and its gradients, and each parameter's gradient of one microbatch; all that comes out is copied from
there. A microbatch has its graphs from its forward to the end of its backward, and microbatches that do the
same take turns (:mod:`..runtime.graphs.stage_graphs`): how many there are is read off a stage's list.

Activations are counted as without graphs. They lie in memory of the graphs' own, which nobody else can use in
between: what is allocated may be less than what is said here, what the process has reserved is not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan.step.actions import Action, ActionKind
from ..plan.step.memory import ActionMemory
from ..plan.step.segments import Segment
from ..record.commands.recording import Recording
from ..record.parameters.placement import Placement
from ..runtime.graphs.alike import Likeness
from ..runtime.graphs.allowed import modules_of, why_not
from ..runtime.graphs.stage_graphs import GRAPHS_VARIABLE, are_wanted
from ..runtime.step.batches import Batch
from ..session import Session

__all__ = ["GraphMemory", "graph_memory", "graph_notes"]


@dataclass
class GraphMemory:
    """Of one stage.

    Attributes:
        num_bytes: what graphs hold for good.
        copied: by backward action, bytes of gradients of parameters that are copied at its end.
        num_graphs: how many graphs of a forward, each with that of its backward.
        not_graphs: why segments are none.
    """

    num_bytes: int = 0
    num_graphs: int = 0
    copied: dict[Action, int] = field(default_factory=dict)
    not_graphs: dict[str, None] = field(default_factory=dict)

    def added_to(self, memory: ActionMemory, action: Action) -> ActionMemory:
        """What the action does to memory where its segment is a graph."""
        if action not in self.copied:
            return memory
        return replace(memory, peak=max(memory.peak, memory.kept + self.copied[action]))


def graph_memory(
    session: Session, batch: Batch, recordings: Mapping[int, Recording], stage_index: int
) -> GraphMemory:
    """Empty where there are no graphs.

    Args:
        session: as for :func:`..memory_preview.preview_memory`.
        batch: the step's last batch of work.
        recordings: by microbatch.
        stage_index: which stage.
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
    free: Counter[Likeness] = Counter()
    in_use: dict[tuple[int, int], Likeness] = {}
    for action in batch.schedule[stage_index]:
        where = action.microbatch_index, action.visit
        if action.kind is ActionKind.FORWARD:
            segment, recording = segments[where], recordings[action.microbatch_index]
            if (reason := why_not(recording, segment)) is not None:
                found.not_graphs[reason] = None
                continue
            likeness = Likeness(recording, segment)
            if free[likeness]:
                free[likeness] -= 1
            else:
                found.num_graphs += 1
                found.num_bytes += _held(placement, recording, segment)
            if segment.has_backward:
                in_use[where] = likeness
            else:
                free[likeness] += 1
        elif action.kind is ActionKind.BACKWARD and where in in_use:
            free[in_use.pop(where)] += 1
            recording = recordings[action.microbatch_index]
            found.copied[action] = _parameter_bytes(placement, recording, segments[where])
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
    if session.cfg.sharded_data_parallel_degree > 1 or session.shard_axes:
        return "parameters are sharded"
    if session.cfg.offload_activations:
        return "activations are offloaded"
    if session.stage_peers and not session.stage_peers.is_alone:
        return "several ranks share a stage"
    if any(action.kind is ActionKind.WEIGHT for actions in batch.schedule for action in actions):
        return "gradients of weights may come in actions of their own (pipeline)"
    return ""


def _held(placement: Placement, recording: Recording, segment: Segment) -> int:
    given = sum(
        tensor.numel() * tensor.element_size()
        for index in segment.commands
        for tensor, source in zip(
            recording.commands[index].arguments.tensors, recording.commands[index].sources, strict=True
        )
        if source < 0
    )
    forward = {*segment.imports}, {*segment.exports, *segment.gradient_exports, *segment.roots}
    backward = {*segment.gradient_imports}, {*segment.gradient_exports, *segment.roots}
    values = [value for values in (*forward, *backward) for value in values]
    parameters = _parameter_bytes(placement, recording, segment) if segment.has_backward else 0
    return given + parameters + sum(recording.values[value].meta.num_bytes for value in values)


def _parameter_bytes(placement: Placement, recording: Recording, segment: Segment) -> int:
    """Of the gradients of all parameters that the segment uses."""
    names = [recording.commands[index].parameter for index in segment.commands]
    used = [placement.parameter(name) for name in names if name is not None]
    used += [p for module in modules_of(recording, segment) for p in module.parameters()]
    wanted = {id(p): p for p in used if p.requires_grad}
    return sum(p.numel() * p.element_size() for p in wanted.values())
