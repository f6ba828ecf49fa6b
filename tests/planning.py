"""Small recordings for the tests of the planner, and the way from one to its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.step.actions import Action, ActionKind
from smp_lite.plan.step.lowering import Schedule, lower
from smp_lite.plan.step.memory import ActionMemory, step_peak
from smp_lite.plan.step.schedule_text import schedule_text
from smp_lite.plan.step.segments import CommandNode, Segment, SegmentGraph, build_graph
from smp_lite.plan.step.simulate import Simulation, simulate


@dataclass(frozen=True)
class Planned:
    """What the planner makes of some works."""

    works: tuple[Work, ...]
    order: tuple[Action, ...]
    schedule: Schedule

    def simulate(self) -> Simulation:
        """Replays it."""
        return simulate(self.schedule, self.works)

    def most_kept(self) -> tuple[int, ...]:
        """For each stage the most forwards that wait for their backwards."""
        change = {ActionKind.FORWARD: ActionMemory(1, 0, 1), ActionKind.BACKWARD: ActionMemory(-1, 0, 0)}
        peaks = [
            step_peak(actions, lambda action: change.get(action.kind, ActionMemory()))
            for actions in self.schedule
        ]
        return tuple(peak.kept + peak.running for peak in peaks)

    def lists(self) -> list[str]:
        """For each stage its actions as text."""
        return [" ".join(map(str, actions)) for actions in self.schedule]

    def staircase(self) -> str:
        """The drawing of the simulated step, without what is written below it."""
        return schedule_text(self.simulate()).partition("\n\n")[0]


def command(
    stage_index: int,
    inputs: Sequence[int],
    output: int,
    *,
    cost: float = 1.0,
    epoch: int = 0,
    weight_cost: float = 0.0,
) -> CommandNode:
    """A command with one output, through which gradients flow to all inputs."""
    links = (tuple(inputs),)
    return CommandNode(
        stage_index, tuple(inputs), (output,), links, cost=cost, epoch=epoch, weight_cost=weight_cost
    )


def chain(
    stages: Sequence[int], costs: Sequence[float] | None = None, *, weight_share: float = 0.0
) -> SegmentGraph:
    """Commands in a row, command ``i`` making value ``i``; the last one is the loss.

    A ``W`` costs ``weight_share`` of the forward.
    """
    costs = costs or [1.0] * len(stages)
    return build_graph(
        [
            command(stage_index, [i - 1] if i else [], i, cost=costs[i], weight_cost=weight_share * costs[i])
            for i, stage_index in enumerate(stages)
        ],
        roots=[len(stages) - 1],
    )


def plan(
    graph: SegmentGraph,
    num_microbatches: int,
    *,
    pipeline: str = "interleaved",
    optimize: str = "memory",
    active_microbatches: int = 4,
) -> Planned:
    """Plans a step of equal microbatches."""
    works = tuple(Work(m, graph) for m in range(num_microbatches))
    return plan_works(works, Policy(pipeline, optimize, active_microbatches))


def plan_works(works: Sequence[Work], policy: Policy) -> Planned:
    """Plans a step, or what is left of it."""
    num_stages = 1 + max(s.stage_index for work in works for s in work.graph.segments)
    order = compute_order(works, policy)
    return Planned(tuple(works), tuple(order), lower(order, works, num_stages))


def segment_at(graph: SegmentGraph, stage_index: int, visit: int = 0) -> Segment:
    """The segment that a microbatch reaches at this visit of this stage."""
    found = [s for s in graph.segments if (s.stage_index, s.visit) == (stage_index, visit)]
    assert len(found) == 1
    return found[0]
