"""From the commands of one microbatch to the segments that the schedule moves about.

Recording gives a list of commands, each on one stage, each consuming and producing values. A *segment* is
a set of commands of one stage that can run in one go: everything it needs from outside is known before it
starts. Segments are made greedily in recorded order: a command joins the open segment of its stage unless
one of its inputs depends on that segment, which would close a circle; then it opens a new one. (Where
parameters are sharded, each unit of them has segments of its own, and so has each of several backwards.)
So a chain of stages gives one segment a stage; tied embeddings give the first stage two (a U); placements
that jump back and forth give more, with no special case.

A value that crosses a segment boundary is cut there: the consumer gets a leaf, and the backward of a
segment is one ``torch.autograd.backward`` over its outputs. :func:`build_graph` therefore also works out,
from which input reaches which output differentiably, where gradients will flow: which segments have a
backward at all, and which cut values carry a gradient back. Both ends of every transfer know this in
advance, so no message has to say "there is no gradient".

Legend: a *value* is an integer, numbered in recorded order within the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class CommandNode:
    """A recorded command as the planner sees it.

    Args:
        stage_index: the stage that executes it.
        inputs: values consumed.
        outputs: values produced.
        links: for each output, the inputs that a gradient of that output would reach.
        cost: its forward's cost, in any one unit.
        epoch: how often execution had been forced before it was recorded. Commands of different
            epochs never share a segment, since the earlier ones have run already.
        touches: numbers of the state that it changes (running statistics); whatever touches the same state
            runs in recorded order.
        unit: commands of different units never share a segment: their parameters are brought together, and
            let go of, unit by unit.
        weight_cost: the part of its backward, in the unit of ``cost``, that gives gradients of parameters
            and can run later than the rest.
        backwards: bits of the ``model.backward`` calls that reach it, where there are several. Commands of
            different ones never share a segment: what each call adds to a gradient is a sum of its own.
    """

    stage_index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    cost: float = 1.0
    epoch: int = 0
    touches: tuple[int, ...] = ()
    unit: int = 0
    weight_cost: float = 0.0
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Commands of one stage and one microbatch that run in one go.

    ``exports`` are values that somebody outside needs (another segment, or the step's outputs);
    ``gradient_exports`` those of them for which a gradient comes back; ``gradient_imports`` the imports
    for which this segment's backward makes a gradient; ``roots`` the losses in it that
    ``model.backward`` named.
    """

    index: int
    stage_index: int
    visit: int
    commands: tuple[int, ...]
    imports: tuple[int, ...]
    exports: tuple[int, ...]
    gradient_exports: tuple[int, ...]
    gradient_imports: tuple[int, ...]
    roots: tuple[int, ...]
    forward_cost: float
    epoch: int
    after: tuple[int, ...] = ()  # segments that change state which this one changes too
    weight_cost: float = 0.0  # of its backward, what may run later
    backwards: int = 0  # as its commands'

    @property
    def has_backward(self) -> bool:
        return bool(self.gradient_exports or self.roots)


@dataclass(frozen=True)
class SegmentGraph:
    """The segments of one microbatch and how they hang together."""

    segments: tuple[Segment, ...]
    producer: dict[int, int]  # value -> segment
    consumers: dict[int, tuple[int, ...]]  # value -> segments that import it
    value_bytes: dict[int, int] = field(default_factory=dict)  # size of each cut value
    ordered: frozenset[int] = frozenset()  # stages where several segments change the same state

    def forward_inputs(self, segment: Segment) -> tuple[int, ...]:
        """Segments that must have run forward before this one."""
        return tuple(sorted({*segment.after, *[self.producer[value] for value in segment.imports]}))

    def backward_inputs(self, segment: Segment) -> tuple[int, ...]:
        """Segments whose backward must have run before this one's."""
        return tuple(
            sorted(
                {
                    consumer
                    for value in segment.gradient_exports
                    for consumer in self.gradient_consumers(value)
                }
            )
        )

    def gradient_consumers(self, value: int) -> tuple[int, ...]:
        """Segments that hand back a gradient for this value, the latest first.

        Autograd adds gradients in that order in one process; keeping it keeps the bits.
        """
        return self._gradient_consumers.get(value, ())

    @cached_property
    def _gradient_consumers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for segment in reversed(self.segments):
            for value in segment.gradient_imports:
                found.setdefault(value, []).append(segment.index)
        return {value: tuple(consumers) for value, consumers in found.items()}

    def remote_stages(self, value: int) -> tuple[int, ...]:
        """Stages other than the producer's that import the value."""
        home = self.segments[self.producer[value]].stage_index
        stages = {self.segments[consumer].stage_index for consumer in self.consumers.get(value, ())}
        return tuple(sorted(stages - {home}))

    def gradient_stages(self, value: int) -> tuple[int, ...]:
        """Stages other than the producer's that send back a gradient for the value."""
        home = self.segments[self.producer[value]].stage_index
        stages = {self.segments[segment].stage_index for segment in self.gradient_consumers(value)}
        return tuple(sorted(stages - {home}))


def build_graph(
    commands: Sequence[CommandNode],
    *,
    roots: Iterable[int] = (),
    needed: Iterable[int] = (),
    value_bytes: dict[int, int] | None = None,
) -> SegmentGraph:
    """Groups commands into segments and finds where gradients flow.

    Args:
        commands: in recorded order.
        roots: values that ``model.backward`` named.
        needed: further values wanted after the step (outputs) or already fetched by everybody.
        value_bytes: bytes of each value, kept for the cut ones.
    """
    earlier = _earlier_touches(commands)
    groups, group_of_command = _group(commands, earlier)
    produced_by = {value: i for i, command in enumerate(commands) for value in command.outputs}
    producer = {value: group_of_command[i] for value, i in produced_by.items()}
    roots, needed = set(roots), set(needed)

    imports: list[dict[int, None]] = [{} for _ in groups]
    consumers: dict[int, dict[int, None]] = {}
    for i, command in enumerate(commands):
        group = group_of_command[i]
        for value in command.inputs:
            if producer[value] != group:
                imports[group][value] = None
                consumers.setdefault(value, {})[group] = None

    gradients = _gradient_flow(commands, groups, producer, roots)
    visits: dict[int, int] = {}
    segments = []
    for index, (stage_index, members) in enumerate(groups):
        visit = visits.get(stage_index, 0)
        visits[stage_index] = visit + 1
        outputs = [value for i in members for value in commands[i].outputs]
        segments.append(
            Segment(
                index=index,
                stage_index=stage_index,
                visit=visit,
                commands=tuple(members),
                imports=tuple(imports[index]),
                exports=tuple(v for v in outputs if v in consumers or v in needed),
                gradient_exports=tuple(v for v in outputs if v in gradients.cut),
                gradient_imports=tuple(v for v in imports[index] if (v, index) in gradients.returned),
                roots=tuple(v for v in outputs if v in roots),
                forward_cost=sum(commands[i].cost for i in members),
                epoch=commands[members[0]].epoch,
                after=tuple(sorted({group_of_command[e] for i in members for e in earlier[i]} - {index})),
                weight_cost=sum(commands[i].weight_cost for i in members),
                backwards=commands[members[0]].backwards,
            )
        )
    sizes = value_bytes or {}
    return SegmentGraph(
        segments=tuple(segments),
        producer={value: producer[value] for value in producer if value in consumers or value in needed},
        consumers={value: tuple(sorted(found)) for value, found in consumers.items()},
        value_bytes={value: sizes[value] for value in consumers if value in sizes},
        ordered=frozenset(segment.stage_index for segment in segments if segment.after),
    )


def _earlier_touches(commands: Sequence[CommandNode]) -> list[tuple[int, ...]]:
    """For each command the last ones before it that touch what it touches."""
    last: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for i, command in enumerate(commands):
        found.append(tuple([last[state] for state in command.touches if state in last]))
        last.update(dict.fromkeys(command.touches, i))
    return found


def _group(
    commands: Sequence[CommandNode], earlier: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Greedy grouping; returns (stage, command indices) of each group, and each command's group.

    Ancestor sets are bit masks over groups. Joining a command to its stage's open group is allowed if no
    input comes from a descendant of that group.
    """
    groups: list[tuple[int, list[int]]] = []
    ancestors: list[int] = []
    followers: list[dict[int, None]] = []  # of each group, those that need it directly
    group_of_command: list[int] = []
    producer: dict[int, int] = {}
    open_group: dict[tuple[int, int, int, int], int] = {}
    for i, command in enumerate(commands):
        sources = {producer[value] for value in command.inputs}
        sources.update([group_of_command[e] for e in earlier[i]])
        key = (command.stage_index, command.epoch, command.unit, command.backwards)
        group = open_group.get(key)
        if group is None or any(s != group and ancestors[s] >> group & 1 for s in sources):
            group = len(groups)
            groups.append((command.stage_index, []))
            ancestors.append(0)
            followers.append({})
            open_group[key] = group
        for source in sources - {group}:
            if group not in followers[source]:
                followers[source][group] = None
                _inherit(ancestors, followers, group, ancestors[source] | 1 << source)
        groups[group][1].append(i)
        group_of_command.append(group)
        for value in command.outputs:
            producer[value] = group
    return _in_dependency_order(groups, ancestors, group_of_command)


def _inherit(ancestors: list[int], followers: list[dict[int, None]], group: int, more: int) -> None:
    """The group has more ancestors, and so has all that needs it, as far as that is news to them."""
    news = [group]
    while news:
        group = news.pop()
        if more & ~ancestors[group]:
            ancestors[group] |= more
            news += followers[group]


def _in_dependency_order(
    groups: list[tuple[int, list[int]]], ancestors: list[int], group_of_command: list[int]
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Numbers the groups so that every group comes after those it needs.

    A group may have been opened early and joined late, by a command that needs a group opened in between.
    """
    order = sorted(range(len(groups)), key=lambda g: (ancestors[g].bit_count(), g))
    # An ancestor of g has strictly fewer ancestors than g, so this order is topological.
    position = {group: index for index, group in enumerate(order)}
    return [groups[g] for g in order], [position[g] for g in group_of_command]


@dataclass(frozen=True)
class _GradientFlow:
    cut: set[int]  # cut values for which at least one consumer hands back a gradient
    returned: set[tuple[int, int]]  # (value, consumer group)


def _gradient_flow(
    commands: Sequence[CommandNode],
    groups: Sequence[tuple[int, list[int]]],
    producer: dict[int, int],
    roots: set[int],
) -> _GradientFlow:
    flow = _GradientFlow(set(), set())
    for group in reversed(range(len(groups))):
        made = [value for i in groups[group][1] for value in commands[i].outputs]
        reached = {value for value in made if value in roots or value in flow.cut}
        if not reached:
            continue
        for i in reversed(groups[group][1]):
            command = commands[i]
            for output, inputs in zip(command.outputs, command.links, strict=True):
                if output not in reached:
                    continue
                for value in inputs:
                    if producer[value] == group:
                        reached.add(value)
                    else:
                        flow.cut.add(value)
                        flow.returned.add((value, group))
    return flow
