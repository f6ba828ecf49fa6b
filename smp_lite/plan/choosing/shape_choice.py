"""How many pieces each stage gets, and which schedule, decided before the first step: a pure function.

For each shape (one piece; two to four, round robin; two, there and back) the solver's partition is made a
chain of pieces (:mod:`.pieces`), which is ordered and simulated under the policies that suit it
(:mod:`.choice`). A message costs a latency and its bytes. What the library does itself counts too, since it
decides for small modules: each action, each message at both its ends, and each call whose gradients are made
later. A gain below :data:`WORTH` is not worth more pieces.

The bound of memory is ``memory_limit`` on every rank, or what 1F1B with one piece needs on the rank that
needs most, and :data:`SLACK` of that, since the estimates are no better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..order.shapes import shape_of
from ..partitioning.partition import Partition
from ..partitioning.solver import TooFewModulesError, solve_partition
from ..partitioning.virtual_stages import VirtualStages
from ..step.actions import ActionKind
from ..step.segments import SegmentGraph
from ..step.work import ActionCosts, Costs, Policy, compute_cost
from ..units import human_bytes
from .choice import Alternative, Choice, Outcome, choose
from .pieces import MemoryEstimate, ModelCosts, estimate_memory, pieces_graph, trained_modules

__all__ = [
    "FLOPS",
    "PARAMETERS",
    "SECONDS",
    "Candidate",
    "ShapeChoice",
    "Taken",
    "Unit",
    "candidate_of",
    "choose_shape",
    "shape_candidates",
]

WORTH = 0.02
SLACK = 0.05

LATENCY_S = 50e-6
BYTES_PER_S = 2e9
"""Of a message, between two processes of one machine, over MPI."""
ACTION_S = 50e-6
"""Of an action beside its work; as much for starting or taking a message. See ``make bench``."""
SPLIT_S = 70e-6
"""By which a module with parameters takes longer, forward to ``W``, where its backward is split."""
FLOPS_PER_S = 5e10
"""Of a rank, where only operations are known."""

_SHAPES: tuple[VirtualStages, ...] = (1, 2, 3, 4, "v")
_SHAPES_OF_LARGE: Sequence[tuple[int, tuple[VirtualStages, ...]]] = ((12_000, (1,)), (3_000, (1, 2, "v")))
"""By stages times microbatches: of larger steps fewer are tried, so that the choice takes seconds."""
_PIPELINES: dict[VirtualStages, tuple[str, str]] = {
    1: ("interleaved", "zero_bubble"),
    "v": ("interleaved", "zero_bubble_v"),
}
_ROUNDS = ("interleaved_virtual", "zero_bubble")


@dataclass(frozen=True)
class Unit:
    """What costs are counted in, and what the library's own doings cost in that.

    Args:
        name: for the table.
        scale: of the name's unit, in that of the costs.
        latency: of a message.
        bytes_per_unit: how many go over in one of it.
        action: of an action beside its work, and of a message at each end.
        split: of a module with parameters, where backwards are split.
        origin: where the costs come from.
    """

    name: str
    scale: float
    latency: float
    bytes_per_unit: float
    action: float
    split: float
    origin: str

    def text(self, value: float) -> str:
        return f"{value / self.scale:.4g} {self.name}"


SECONDS = Unit(
    "ms", 1e-3, LATENCY_S, BYTES_PER_S, ACTION_S, SPLIT_S, "times of the modules, as measured on rank 0"
)
FLOPS = Unit(
    "GFLOP",
    1e9,
    LATENCY_S * FLOPS_PER_S,
    BYTES_PER_S / FLOPS_PER_S,
    ACTION_S * FLOPS_PER_S,
    SPLIT_S * FLOPS_PER_S,
    "operations of the modules, counted",
)
PARAMETERS = Unit("parameters", 1.0, 0.0, float("inf"), 0.0, 0.0, "numbers of parameters alone")


@dataclass(frozen=True)
class Candidate:
    """A partition that may be taken.

    Args:
        name: of its shape.
        num_pieces: of each stage.
        partition: where modules go.
        graph: its chain of pieces.
        trained: modules with parameters of each piece, by (stage, visit).
        memory: what it needs.
        pipelines: that suit it: one with whole backwards, one with split ones; or just one.
    """

    name: str
    num_pieces: int
    partition: Partition
    graph: SegmentGraph
    trained: Mapping[tuple[int, int], int]
    memory: MemoryEstimate
    pipelines: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """What all ranks have to know of the choice.

    Args:
        partition: where modules go.
        pipeline: the best one.
        pipelines: those that fit, in the order of the candidate's.
        memory: of the partition.
    """

    partition: Partition
    pipeline: str
    pipelines: tuple[str, ...]
    memory: MemoryEstimate


@dataclass(frozen=True)
class ShapeChoice:
    """Everything that was tried.

    Args:
        choice: by alternative.
        candidates: by alternative's name.
        unit: of the costs.
        notes: for the table.
    """

    choice: Choice
    candidates: dict[str, Candidate]
    unit: Unit
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> Taken | None:
        """None: nothing fits."""
        best = self.choice.best
        if best is None:
            return None
        candidate = self.candidates[best.alternative.name]
        fitting = {
            outcome.alternative.policy.pipeline
            for outcome in self.choice.outcomes
            if not outcome.excluded and self.candidates[outcome.alternative.name] is candidate
        }
        pipelines = tuple(pipeline for pipeline in candidate.pipelines if pipeline in fitting)
        return Taken(candidate.partition, best.alternative.policy.pipeline, pipelines, candidate.memory)

    def table(self) -> str:
        """For the user; no newline at the end."""
        return "\n".join([self.choice.table(time=self.unit.text, peak=_bytes_text), *self.notes])

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return self.choice.outcomes


def shape_candidates(
    costs: ModelCosts, num_stages: int, num_microbatches: int, *, memory_weight: float
) -> tuple[list[Candidate], list[str]]:
    """One for each shape; and notes on those that there are none for."""
    size = num_stages * num_microbatches
    shapes = next((few for least, few in _SHAPES_OF_LARGE if size > least), _SHAPES)
    found, too_few = [], []
    for shape in shapes:
        try:
            partition = solve_partition(
                costs.balanced, num_stages, memory_weight=memory_weight, virtual_stages=shape
            )
        except TooFewModulesError:
            too_few.append(_name(shape))
            continue
        found.append(
            Candidate(
                _name(shape),
                2 if shape == "v" else shape,
                partition,
                pieces_graph(costs.balanced, partition),
                trained_modules(costs.balanced, partition),
                estimate_memory(costs, partition),
                _PIPELINES.get(shape, _ROUNDS),
            )
        )
    notes = []
    if too_few:
        notes.append(f"not enough modules to cut apart for {', '.join(too_few)}")
    if left_out := [_name(shape) for shape in _SHAPES if shape not in shapes]:
        notes.append(f"not tried, since the step is large (set virtual_stages for it): {', '.join(left_out)}")
    return found, notes


def candidate_of(costs: ModelCosts, partition: Partition, pipelines: Sequence[str] = ()) -> Candidate:
    """A partition that is given.

    Args:
        pipelines: to try; none: those that suit its shape.
    """
    graph = pieces_graph(costs.balanced, partition)
    shape = shape_of(graph)
    num_visits = shape.num_visits if shape is not None else 1
    meant: VirtualStages = "v" if shape is not None and shape.is_v else num_visits
    suiting = _PIPELINES.get(meant, _ROUNDS)
    memory = estimate_memory(costs, partition)
    trained = trained_modules(costs.balanced, partition)
    return Candidate("as given", num_visits, partition, graph, trained, memory, tuple(pipelines) or suiting)


def choose_shape(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    policy: Policy,
    unit: Unit,
    *,
    memory_limit: int | None = None,
    notes: Sequence[str] = (),
) -> ShapeChoice:
    """Tries every candidate under each of its pipelines.

    Args:
        candidates: the one with the fewest pieces first.
        policy: everything but the pipeline.
        unit: of the costs.
        memory_limit: bytes of each rank; None: what the first candidate needs under 1F1B.
        notes: for the table.
    """
    by_name: dict[str, Candidate] = {}
    alternatives = []
    for candidate in candidates:
        for pipeline in candidate.pipelines:
            name = f"{pipeline}, {candidate.name}"
            by_name[name] = candidate
            own = replace(policy, pipeline=pipeline)
            costs = _costs(candidate, unit, splits=own.splits_backward)
            alternatives.append(Alternative(name, candidate.graph, own, costs, candidate.num_pieces))
    num_stages = max((candidate.partition.num_stages for candidate in candidates), default=0)
    choice = choose(
        alternatives,
        num_microbatches,
        latency_s=unit.latency,
        bytes_per_s=unit.bytes_per_unit,
        peaks_of=lambda alternative, schedule: by_name[alternative.name].memory.peaks(schedule),
        limits=None if memory_limit is None else [memory_limit] * num_stages,
        slack=SLACK,
        worth=WORTH,
        peak_text=_bytes_text,
    )
    return ShapeChoice(choice, by_name, unit, tuple(notes))


def _costs(candidate: Candidate, unit: Unit, *, splits: bool) -> Costs:
    """Of the pieces, with what the library does around them."""
    graph, action = candidate.graph, unit.action
    found: dict[tuple[int, int], ActionCosts] = {}
    for segment in graph.segments:
        place = segment.stage_index, segment.visit
        forward = compute_cost(ActionKind.FORWARD, segment, split=splits)
        whole = compute_cost(ActionKind.BACKWARD, segment, split=False)
        weight = min(segment.weight_cost, whole)
        around = action * (1 + len(segment.imports) + len(segment.exports))
        later = action + unit.split * candidate.trained.get(place, 0) if splits and weight else 0.0
        found[place] = ActionCosts(forward + around, whole - weight + around, weight + later)
    return found


def _name(shape: VirtualStages) -> str:
    return "2 pieces, v" if shape == "v" else "1 piece" if shape == 1 else f"{shape} pieces"


def _bytes_text(num_bytes: float) -> str:
    return human_bytes(round(num_bytes))
