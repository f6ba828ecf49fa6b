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

In one process autograd adds up the gradients of a value one by one, that of its latest use first, and the
bits of a sum depend on how it is grouped. So the segments that use a value of more than two uses follow each
other as the uses do: a command that uses it after a later segment has opens a new one. Where a segment other
than the latest one may add several gradients, or a stage would add up its own first, the value is *summed in
turn*: each segment's backward takes in what the later ones have found, adds its own to it, use by use, and
hands the sum on to the segment before it, the first one to the producer. The gradient with which a backward
begins comes before all of them, so the latest segment takes it in. Other gradients go to the producer at
once, which adds them up. Of two the bits do not depend on the order, but the strides of the sum do, by which
kernels are chosen: where the segment that makes a value uses it itself after another one has (``f(x) + x``
with ``f`` elsewhere), the other's gradient has to come second. A stage's segments, which may share
parameters, run backward in reverse too.

Legend: a *value* is an integer, numbered in recorded order within the microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class CommandNode:
    """A recorded command as the planner sees it.

    Args:
        stage_index: the stage that executes it.
        inputs: values consumed.
        outputs: values produced.
        links: for each output, the inputs that a gradient of that output would reach, each as often as it
            would be added to there.
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
    ``model.backward`` named; ``late_uses`` pairs commands with the gradient exports that they use after
    another segment has.
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
    backward_after: tuple[int, ...] = ()  # segments of its stage whose backward comes first in any case
    weight_cost: float = 0.0  # of its backward, what may run later
    backwards: int = 0  # as its commands'
    late_uses: tuple[tuple[int, int], ...] = ()

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
    summed_in_turn: frozenset[int] = frozenset()  # values, see the module

    def forward_inputs(self, segment: Segment) -> tuple[int, ...]:
        """Segments that must have run forward before this one."""
        return tuple(sorted({*segment.after, *[self.producer[value] for value in segment.imports]}))

    def backward_inputs(self, segment: Segment) -> tuple[int, ...]:
        """Segments whose backward must have run before this one's."""
        sources = [self.gradient_sources(segment, value) for value in self.gradients_taken(segment)]
        return tuple(sorted({*segment.backward_after, *[source for found in sources for source in found]}))

    def gradients_taken(self, segment: Segment) -> tuple[int, ...]:
        """Values of which the segment's backward takes in a gradient: those that it has made, and those that
        are summed in turn and have later consumers."""
        if not self.summed_in_turn:
            return segment.gradient_exports
        return (*segment.gradient_exports, *self.sums_taken(segment))

    def sums_taken(self, segment: Segment) -> tuple[int, ...]:
        """Values that other segments have made of whose gradient the segment's backward takes in a part."""
        in_turn = [value for value in segment.gradient_imports if value in self.summed_in_turn]
        return tuple([value for value in in_turn if self._gradient_consumers[value][0] != segment.index])

    def seeds_taken(self, segment: Segment) -> tuple[int, ...]:
        """Values that other segments have made at which a backward begins, and the segment's adds to that."""
        in_turn = [value for value in segment.gradient_imports if value in self.summed_in_turn]
        latest = [value for value in in_turn if self._gradient_consumers[value][0] == segment.index]
        return tuple([value for value in latest if value in self.segments[self.producer[value]].roots])

    def gradient_sources(self, segment: Segment, value: int) -> tuple[int, ...]:
        """Segments that hand the segment a gradient of the value, the latest first.

        Autograd adds gradients in that order in one process; keeping it keeps the bits.
        """
        consumers = self._gradient_consumers.get(value, ())
        if value not in self.summed_in_turn:
            return consumers
        if self.producer[value] == segment.index:
            return consumers[-1:]
        place = consumers.index(segment.index)
        return consumers[place - 1 : place] if place else ()

    def gradient_target(self, segment: Segment, value: int) -> Segment:
        """To whom the segment hands the gradient that it makes of a value of another segment."""
        if value in self.summed_in_turn:
            consumers = self._gradient_consumers[value]
            following = consumers[consumers.index(segment.index) + 1 :]
            if following:
                return self.segments[following[0]]
        return self.segments[self.producer[value]]

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


def build_graph(
    commands: Sequence[CommandNode],
    *,
    roots: Iterable[int] = (),
    needed: Iterable[int] = (),
    value_bytes: dict[int, int] | None = None,
    may_grow: bool = False,
) -> SegmentGraph:
    """Groups commands into segments and finds where gradients flow.

    Args:
        commands: in recorded order.
        roots: values that ``model.backward`` named.
        needed: further values wanted after the step (outputs) or already fetched by everybody.
        value_bytes: bytes of each value, kept for the cut ones.
        may_grow: commands are still being recorded, or were when some ran: how those are grouped must not
            depend on what came after them.
    """
    earlier = _earlier_touches(commands)
    roots, needed = set(roots), set(needed)
    added = _gradients_added(commands, roots)
    total: Counter[int] = Counter()
    for numbers in added:
        total.update(numbers)
    several = None if may_grow else {v for v, number in total.items() if number + (v in roots) > 2}
    groups, group_of_command = _group(commands, earlier, several)
    produced_by = {value: i for i, command in enumerate(commands) for value in command.outputs}
    producer = {value: group_of_command[i] for value, i in produced_by.items()}

    imports: list[dict[int, None]] = [{} for _ in groups]
    consumers: dict[int, dict[int, None]] = {}
    for i, command in enumerate(commands):
        group = group_of_command[i]
        for value in command.inputs:
            if producer[value] != group:
                imports[group][value] = None
                consumers.setdefault(value, {})[group] = None

    returned: Counter[tuple[int, int]] = Counter()  # (value, consumer): how many gradients it adds up
    used_elsewhere: set[int] = set()
    late_uses: list[list[tuple[int, int]]] = [[] for _ in groups]
    for i, numbers in enumerate(added):
        group = group_of_command[i]
        for value, number in numbers.items():
            if producer[value] != group:
                returned[value, group] += number
                used_elsewhere.add(value)
            elif value in used_elsewhere:
                late_uses[group].append((i, value))
    cut = {value for value, _ in returned}
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
                gradient_exports=tuple(v for v in outputs if v in cut),
                gradient_imports=tuple(v for v in imports[index] if (v, index) in returned),
                roots=tuple(v for v in outputs if v in roots),
                forward_cost=sum(commands[i].cost for i in members),
                epoch=commands[members[0]].epoch,
                after=tuple(sorted({group_of_command[e] for i in members for e in earlier[i]} - {index})),
                weight_cost=sum(commands[i].weight_cost for i in members),
                backwards=commands[members[0]].backwards,
                late_uses=() if may_grow else tuple(late_uses[index]),
            )
        )
    sizes = value_bytes or {}
    in_turn = _summed_in_turn(segments, producer, returned, roots)
    graph = SegmentGraph(
        segments=tuple(segments),
        producer={value: producer[value] for value in producer if value in consumers or value in needed},
        consumers={value: tuple(sorted(found)) for value, found in consumers.items()},
        value_bytes={value: sizes[value] for value in consumers if value in sizes},
        ordered=frozenset(segment.stage_index for segment in segments if segment.after),
        summed_in_turn=in_turn,
    )
    latest_first = _latest_first(graph)
    return replace(graph, segments=latest_first) if latest_first != graph.segments else graph


def _latest_first(graph: SegmentGraph) -> tuple[Segment, ...]:
    """The segments, each after the next one of its stage and backwards where no gradient says so."""
    earlier = [0] * len(graph.segments)  # bits of those whose backward comes before
    following: dict[tuple[int, int], int] = {}
    found = []
    for segment in reversed(graph.segments):
        if segment.has_backward:
            for index in graph.backward_inputs(segment):
                earlier[segment.index] |= earlier[index] | 1 << index
            place = segment.stage_index, segment.backwards
            after = following.get(place)
            if after is not None and not earlier[segment.index] >> after & 1:
                earlier[segment.index] |= earlier[after] | 1 << after
                segment = replace(segment, backward_after=(after,))
            following[place] = segment.index
        found.append(segment)
    return tuple(reversed(found))


def _gradients_added(commands: Sequence[CommandNode], roots: set[int]) -> list[Counter[int]]:
    """For each command, how many gradients at most its backward adds to each value's."""
    wanted = set(roots)
    added: list[Counter[int]] = []
    for command in reversed(commands):
        reached = [
            linked for output, linked in zip(command.outputs, command.links, strict=True) if output in wanted
        ]
        added.append(Counter([value for linked in reached for value in linked]))
        wanted.update(added[-1])
    added.reverse()
    return added


def _summed_in_turn(
    segments: Sequence[Segment],
    producer: dict[int, int],
    returned: Counter[tuple[int, int]],
    roots: set[int],
) -> frozenset[int]:
    consumers: dict[int, list[int]] = {}
    for value, group in sorted(returned):
        consumers.setdefault(value, []).append(group)
    found = set()
    for value, groups in consumers.items():
        before = groups if value in roots else groups[:-1]  # those whose sums do not start with nothing
        home = segments[producer[value]].stage_index
        abroad = [stage for stage in [segments[group].stage_index for group in groups] if stage != home]
        adds_own_first = len(before) > 1 and len(set(abroad)) < len(abroad)
        if adds_own_first or any(returned[value, group] > 1 for group in before):
            found.add(value)
    return frozenset(found)


def _earlier_touches(commands: Sequence[CommandNode]) -> list[tuple[int, ...]]:
    """For each command the last ones before it that touch what it touches."""
    last: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for i, command in enumerate(commands):
        found.append(tuple([last[state] for state in command.touches if state in last]))
        last.update(dict.fromkeys(command.touches, i))
    return found


def _group(
    commands: Sequence[CommandNode], earlier: Sequence[tuple[int, ...]], several: set[int] | None
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Greedy grouping; returns (stage, command indices) of each group, and each command's group.

    Ancestor sets are bit masks over groups. Joining a command to its stage's open group is allowed if no
    input comes from a descendant of that group, and none of those whose uses must follow each other
    (``several``; None: of all) has been used by one before.
    """
    groups: list[tuple[int, list[int]]] = []
    ancestors: list[int] = []
    followers: list[dict[int, None]] = []  # of each group, those that need it directly
    group_of_command: list[int] = []
    producer: dict[int, int] = {}
    last_user: dict[int, int] = {}
    open_group: dict[tuple[int, int], tuple[int, int, int]] = {}
    for i, command in enumerate(commands):
        sources = {producer[value] for value in command.inputs}
        sources.update([group_of_command[e] for e in earlier[i]])
        used = {value for linked in command.links for value in linked if several is None or value in several}
        sources.update([last_user[value] for value in used if value in last_user])
        # A stage's groups follow each other, since they may use the same parameters.
        place = command.stage_index, command.backwards
        epoch, unit, group = open_group.get(place, (-1, -1, -1))
        is_open = (epoch, unit) == (command.epoch, command.unit)
        if not is_open or any(s != group and ancestors[s] >> group & 1 for s in sources):
            if group >= 0:
                sources.add(group)
            group = len(groups)
            groups.append((command.stage_index, []))
            ancestors.append(0)
            followers.append({})
            open_group[place] = command.epoch, command.unit, group
        for source in sources - {group}:
            if group not in followers[source]:
                followers[source][group] = None
                _inherit(ancestors, followers, group, ancestors[source] | 1 << source)
        groups[group][1].append(i)
        group_of_command.append(group)
        for value in command.outputs:
            producer[value] = group
        last_user.update(dict.fromkeys(used, group))
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
