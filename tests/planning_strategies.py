"""Random recordings for the tests of the planner: commands, placements, forced executions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from smp_lite.plan.order.schedules import Policy, Work
from smp_lite.plan.partitioning.partition import ModuleCost
from smp_lite.plan.step.segments import CommandNode, SegmentGraph, build_graph

MAX_STAGES = 4

policies = st.builds(
    Policy,
    pipeline=st.sampled_from(
        ["simple", "interleaved", "zero_bubble", "interleaved_virtual", "zero_bubble_v"]
    ),
    optimize=st.sampled_from(["memory", "speed"]),
    active_microbatches=st.integers(1, 4),
)


@dataclass(frozen=True)
class RandomRecording:
    """The arguments of :func:`smp_lite.plan.step.segments.build_graph`."""

    commands: list[CommandNode]
    roots: set[int]
    needed: set[int]

    def graph(self) -> SegmentGraph:
        may_grow = self.commands[-1].epoch > 0
        return build_graph(self.commands, roots=self.roots, needed=self.needed, may_grow=may_grow)


@st.composite
def recordings(draw: st.DrawFn, *, max_commands: int = 12) -> RandomRecording:
    """One microbatch with random stages, inputs, outputs, links and some forced executions."""
    commands: list[CommandNode] = []
    values: list[int] = []
    epoch = 0
    for _ in range(draw(st.integers(1, max_commands))):
        inputs = draw(st.lists(st.sampled_from(values), unique=True, max_size=3)) if values else []
        num_outputs = draw(st.integers(1, 2))
        outputs = range(len(values), len(values) + num_outputs)
        values.extend(outputs)
        linked = st.lists(st.sampled_from(inputs), max_size=4) if inputs else st.just([])
        epoch += draw(st.integers(0, 9)) == 0
        commands.append(
            CommandNode(
                stage_index=draw(st.integers(0, MAX_STAGES - 1)),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                links=tuple(tuple(draw(linked)) for _ in outputs),
                cost=float(draw(st.integers(0, 3))),
                weight_cost=float(draw(st.sampled_from([0.0, 1.0, 2.5]))),
                epoch=epoch,
            )
        )
    roots = draw(st.sets(st.sampled_from(values), max_size=2))
    needed = draw(st.sets(st.sampled_from(values), max_size=2))
    return RandomRecording(commands, roots, needed)


def graphs() -> st.SearchStrategy[SegmentGraph]:
    """The segments of small recordings."""
    return recordings(max_commands=8).map(RandomRecording.graph)


def dependencies(graph: SegmentGraph, segments: set[int]) -> set[int]:
    """The segments and all that they need forward."""
    closed = set(segments)
    for segment in reversed(graph.segments):
        if segment.index in closed:
            closed.update(graph.forward_inputs(segment))
    return closed


@st.composite
def partly_done(draw: st.DrawFn) -> Work:
    """A microbatch of which nothing, some segments or all have run, backward included."""
    graph = draw(graphs())
    every = frozenset(segment.index for segment in graph.segments)
    if draw(st.integers(0, 4)) == 0:
        return Work(0, graph, forward_done=every, backward_done=every)
    done = draw(st.sets(st.sampled_from(sorted(every))))
    return Work(0, graph, frozenset(dependencies(graph, done)), complete=draw(st.booleans()))


@st.composite
def module_trees(draw: st.DrawFn, *, shared: bool = True, max_leaves: int = 12) -> ModuleCost:
    """Nested trees of up to `max_leaves` parameter-holding leaves, called in tree order; some
    containers hold parameters too, some modules none, and some parameters are shared.
    """
    num_calls = 0
    budget = draw(st.integers(1, max_leaves))
    names: list[str] = []

    def grow(name: str, depth: int) -> ModuleCost:
        nonlocal num_calls, budget
        order = num_calls
        num_calls += 1
        children: list[ModuleCost] = []
        if depth < 3 and (depth == 0 or draw(st.booleans())):
            numbered = draw(st.booleans())
            for i in range(draw(st.integers(1, 4))):
                part = str(i) if numbered else "abcd"[i]
                children.append(grow(f"{name}.{part}" if name else part, depth + 1))
        holds = budget > 0 and (not children or draw(st.integers(0, 4)) == 0)
        parameter_ids: tuple[str, ...] = ()
        if holds:
            budget -= 1
            tied = shared and names and draw(st.integers(0, 5)) == 0
            parameter_ids = (draw(st.sampled_from(names)) if tied else f"{name}.weight",)
            names.extend(parameter_ids)
        return ModuleCost(
            name=name,
            parameter_ids=parameter_ids,
            parameter_count=holds * 5,
            state_bytes=holds * draw(st.integers(0, 20)),
            compute=float(draw(st.integers(0, 20))),
            output_bytes=draw(st.integers(0, 3)),
            order=order,
            children=tuple(children),
        )

    return grow("", 0)
