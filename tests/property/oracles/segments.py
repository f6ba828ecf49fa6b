"""Segments found with a scan of all groups at every command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smp_lite.plan.step.segments import CommandNode, Segment, SegmentGraph


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
    """
    earlier = _earlier_touches(commands)
    groups, group_of_command = _group(commands, _earlier_uses(commands, earlier, set(roots), may_grow))
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
                weight_cost=sum(commands[i].weight_cost for i in members),
                epoch=commands[members[0]].epoch,
                after=tuple(sorted({group_of_command[e] for i in members for e in earlier[i]} - {index})),
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


def _earlier_uses(
    commands: Sequence[CommandNode], earlier: Sequence[tuple[int, ...]], roots: set[int], may_grow: bool
) -> list[tuple[int, ...]]:
    """Those, and the last uses of what the command uses, if several uses of it follow each other."""
    uses = [[v for linked in command.links for v in linked] for command in commands]
    wanted = set(roots)
    number: dict[int, int] = {}
    for command in reversed(commands):
        for output, linked in zip(command.outputs, command.links, strict=True):
            for value in linked if output in wanted else ():
                number[value] = number.get(value, 0) + 1
                wanted.add(value)
    found = []
    for i in range(len(commands)):
        before = [
            max((e for e in range(i) if value in uses[e]), default=i)
            for value in uses[i]
            if may_grow or number.get(value, 0) + (value in roots) >= 3
        ]
        found.append((*earlier[i], *[e for e in before if e < i]))
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
    group_of_command: list[int] = []
    producer: dict[int, int] = {}
    open_group: dict[int, tuple[int, int, int]] = {}
    for i, command in enumerate(commands):
        sources = {producer[value] for value in command.inputs}
        sources.update([group_of_command[e] for e in earlier[i]])
        *key, group = open_group.get(command.stage_index, (-1, -1, -1))
        joins = key == [command.epoch, command.unit]
        if not joins or any(s != group and ancestors[s] >> group & 1 for s in sources):
            sources |= {group} - {-1}
            group = len(groups)
            groups.append((command.stage_index, []))
            ancestors.append(0)
            open_group[command.stage_index] = command.epoch, command.unit, group
        reached = 0
        for source in sources - {group}:
            reached |= ancestors[source] | 1 << source
        if reached & ~ancestors[group]:
            ancestors[group] |= reached
            for other in range(len(groups)):
                if ancestors[other] >> group & 1:
                    ancestors[other] |= ancestors[group]
        groups[group][1].append(i)
        group_of_command.append(group)
        for value in command.outputs:
            producer[value] = group
    return _in_dependency_order(groups, ancestors, group_of_command)


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
        reached = {v for v, home in producer.items() if home == group and (v in roots or v in flow.cut)}
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
