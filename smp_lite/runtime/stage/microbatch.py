"""What one stage holds of one microbatch while it is in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...comm.wires.wire import Transfer
from ...plan.step.segments import Segment, SegmentGraph
from ...record.backward.engine import edge_of
from ...record.commands.recording import Recording


class StagePart:
    """What one stage needs to know of a graph; worked out once for all microbatches and steps that have it.

    Attributes:
        by_visit: the stage's segments.
        arrivals: for each of their visits the values that come from other stages: (value, stage).
        gradients_taken: for each of their visits the values of which its backward takes in a gradient, and
            where from: (value, [(other stage, the latest consumer there, whose part of it autograd would add
            first)]).
        sums_taken: for each of their visits those of these values that others have made.
        seeds_taken: for each of their visits the values that others have made where a backward begins, if its
            gradient comes in here.
        uses: of the values of a microbatch of which nothing has run: how often each is used here.
    """

    def __init__(self, graph: SegmentGraph, stage_index: int) -> None:
        self.graph = graph
        self.by_visit = {s.visit: s for s in graph.segments if s.stage_index == stage_index}
        self.arrivals: dict[int, list[tuple[int, int]]] = {}
        self.gradients_taken: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}
        self.sums_taken: dict[int, tuple[int, ...]] = {}
        self.seeds_taken: dict[int, tuple[int, ...]] = {}
        self.uses: dict[int, int] | None = None
        stage_of = [s.stage_index for s in graph.segments]
        for visit, segment in self.by_visit.items():
            homes = [(value, stage_of[graph.producer[value]]) for value in segment.imports]
            self.arrivals[visit] = [(value, home) for value, home in homes if home != stage_index]
            self.sums_taken[visit] = graph.sums_taken(segment)
            self.seeds_taken[visit] = graph.seeds_taken(segment)
            taken = self.gradients_taken[visit] = []
            for value in graph.gradients_taken(segment):
                latest: dict[int, int] = {}
                for source in graph.gradient_sources(segment, value):  # the latest first
                    if stage_of[source] != stage_index:
                        latest.setdefault(stage_of[source], source)
                taken.append((value, list(latest.items())))


_NO_PART = StagePart(SegmentGraph((), {}, {}), 0)  # of a microbatch that has not been planned


@dataclass
class MicrobatchState:
    """The tensors of one microbatch on one stage.

    Attributes:
        data: values made here that somebody still needs.
        remaining: how many uses of each of them are left (consumers here, sends, the step's outputs).
        leaves: the cut inputs of each segment that has run, by the segment's first command.
        sums_begin: of those of them of which its commands used something made of the leaf: where their
            gradients are added up, by the segment's first command.
        edges: where the backward of a value that was cut starts; None: nowhere.
        arriving: posted receives of values.
        gradients: gradients of cut values by value and consumer segment, waiting to be summed.
        arriving_gradients: posted receives of gradients, by value and stage.
        inputs: leaves for ordinary tensors of which the gradient is wanted.
        outgoing: gradients of received values, waiting for the last consumer here.
        losses: copies of the single numbers at which backwards begin here; None: nobody asks for them.
    """

    recording: Recording
    part: StagePart = field(default_factory=lambda: _NO_PART)
    graph: SegmentGraph = field(default_factory=lambda: _NO_PART.graph)
    by_visit: dict[int, Segment] = field(default_factory=lambda: _NO_PART.by_visit)
    data: dict[int, torch.Tensor] = field(default_factory=dict)
    remaining: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    sums_begin: dict[int, dict[int, Any]] = field(default_factory=dict)
    edges: dict[int, Any] = field(default_factory=dict)
    arriving: dict[int, Transfer] = field(default_factory=dict)
    gradients: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    arriving_gradients: dict[tuple[int, int], Transfer] = field(default_factory=dict)
    outgoing: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    forward_done: set[int] = field(default_factory=set)  # first commands of segments
    backward_done: set[int] = field(default_factory=set)
    sent: set[tuple[int, int]] = field(default_factory=set)
    losses: dict[int, torch.Tensor] | None = None

    def update(self, part: StagePart, stage_index: int) -> None:
        """Takes a new graph of the (longer) recording."""
        self.part, self.graph, self.by_visit = part, part.graph, part.by_visit
        if self.forward_done or self.sent:
            self.remaining = self._count_uses(stage_index)
            if self.recording.complete:
                self._settle()
            return
        if part.uses is None:  # recordings of one graph need the same values, as its key says
            part.uses = self._count_uses(stage_index)
        self.remaining = dict(part.uses)

    def receives(self) -> list[Transfer]:
        """Posted receives that nobody has taken the result of."""
        return [*self.arriving.values(), *self.arriving_gradients.values()]

    def _count_uses(self, stage_index: int) -> dict[int, int]:
        """Counts the uses that are still to come of values made or received here."""
        remaining: dict[int, int] = {}
        for value, home in self.graph.producer.items():
            segment = self.graph.segments[home]
            here = sum(
                1
                for consumer in self.graph.consumers.get(value, ())
                if self.graph.segments[consumer].stage_index == stage_index
                and self.graph.segments[consumer].commands[0] not in self.forward_done
            )
            if segment.stage_index == stage_index:
                here += sum((value, s) not in self.sent for s in self.graph.remote_stages(value))
                here += value in self.recording.needed
            remaining[value] = here
        return remaining

    def _settle(self) -> None:
        """The recording has ended: keeps of what ran early only what is still needed."""
        for segment in self.by_visit.values():
            key = segment.commands[0]
            if key in self.forward_done and key not in self.backward_done:
                self.begin_backward_at(segment, self.data)
                if not segment.has_backward:
                    self.leaves.pop(key, None)
                    self.sums_begin.pop(key, None)
        segments = self.by_visit.values()
        begun = {value for segment in segments for value in (*segment.gradient_exports, *segment.roots)}
        for value in self.edges.keys() - begun:
            del self.edges[value]
        for value in [v for v in self.data if not self.remaining.get(v)]:
            del self.data[value]

    def begin_backward_at(self, segment: Segment, made: Mapping[int, torch.Tensor]) -> None:
        """Keeps of what a segment has made where its backward will start."""
        for value in (*segment.gradient_exports, *segment.roots):
            if value in self.edges:
                continue
            tensor = made[value]
            # A view made under no_grad says that it wants a gradient, and autograd has nowhere to take it.
            self.edges[value] = None if tensor.grad_fn is None and tensor._is_view() else edge_of(tensor)
            if self.losses is not None and value in segment.roots and made[value].numel() == 1:
                self.losses[value] = made[value].detach().clone()

    def keep(self, value: int, tensor: torch.Tensor) -> None:
        self.data[value] = tensor

    def used(self, value: int) -> None:
        """One use is over; the last one frees the data (its graph stays until its backward)."""
        left = self.remaining.get(value, 0) - 1
        self.remaining[value] = left
        if left <= 0 and self.recording.complete and value in self.data:
            del self.data[value]
