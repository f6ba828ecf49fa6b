"""How planning grows with what is planned: processor time against size.

No process is started, and torch is not needed. Each row is one size; the exponent is that of the straight
line through the rows of one kind, on logarithmic scales (least squares): 1 where twice as much takes twice
as long. What was planned is a chain of equal stages under 1F1B with a full pipeline, and atoms of random
costs, with and without one that is as heavy as a quarter of all, which leaves the others much freedom.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.partitioning.balance import Line, balance, score
from smp_lite.plan.step.lowering import lower
from smp_lite.plan.step.segments import CommandNode, SegmentGraph, build_graph
from smp_lite.plan.step.simulate import simulate

__all__ = ["exponent", "table"]

_COMMANDS_OF_A_STAGE = 16


def table(quick: bool) -> Table:
    """Plans steps and partitions of growing size."""
    result = Table("what", "size", "items", "CPU s", "us an item", title="Planning: time against size")
    squares = [(16, 16), (32, 32), (64, 64)] if quick else [(32, 32), (64, 64), (128, 128), (256, 256)]
    sizes = [*squares, (64, 256)] if quick else [*squares, (64, 256), (512, 512), (1024, 1024)]
    rows: dict[str, list[tuple[str, int, float]]] = {}
    for num_stages, num_microbatches in sizes:
        size = f"{num_stages} stages x {num_microbatches} microbatches"
        for what, num_items, seconds in _step_times(num_stages, num_microbatches):
            rows.setdefault(what, []).append((size, num_items, seconds))
    for num_atoms in (1_000, 3_000, 10_000) if quick else (1_000, 3_000, 10_000, 30_000, 100_000):
        for what, heaviest, contiguous in (
            ("partition", 0.0, True),
            ("partition, one heavy atom", 0.25, True),
            ("partition, contiguous: False", 0.0, False),
        ):
            seconds = _partition_time(num_atoms, 64, heaviest, contiguous=contiguous)
            rows.setdefault(what, []).append((f"{num_atoms:,} atoms on 64 stages", num_atoms, seconds))
    for what, measured in rows.items():
        for size, num_items, seconds in measured:
            each = f"{seconds / num_items * 1e6:.1f}"
            result.add_row(what, size, f"{num_items:,}", f"{seconds:.3f}", each)
        slope = exponent([(num_items, seconds) for _, num_items, seconds in measured])
        result.add_row(what, "exponent", "", f"{slope:.2f}", "", end_section=True)
    return result


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the straight line through (size, time) on logarithmic scales."""
    logs = [(math.log(size), math.log(seconds)) for size, seconds in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def _step_times(num_stages: int, num_microbatches: int) -> list[tuple[str, int, float]]:
    """(what, how many of them, seconds) of each part of planning a step."""
    num_commands = num_stages * _COMMANDS_OF_A_STAGE
    graph, segments = _timed(lambda: _chain(num_stages))
    works = [Work(m, graph) for m in range(num_microbatches)]
    policy = Policy("interleaved", "memory", num_stages)
    order, ordering = _timed(lambda: compute_order(works, policy))
    schedule, lowering = _timed(lambda: lower(order, works, num_stages))
    num_actions = sum(map(len, schedule))
    _, replay = _timed(lambda: simulate(schedule, works))
    return [
        ("segments (commands)", num_commands, segments),
        ("order (forwards and backwards)", len(order), ordering),
        ("lowering (actions)", num_actions, lowering),
        ("simulation (actions)", num_actions, replay),
        ("the whole step (actions)", num_actions, segments + ordering + lowering + replay),
    ]


def _chain(num_stages: int) -> SegmentGraph:
    num_commands = num_stages * _COMMANDS_OF_A_STAGE
    commands = []
    for i in range(num_commands):
        inputs = (i - 1,) if i else ()
        commands.append(CommandNode(i // _COMMANDS_OF_A_STAGE, inputs, (i,), (inputs,)))
    return build_graph(commands, roots=[num_commands - 1])


def _partition_time(num_atoms: int, num_stages: int, heaviest: float, *, contiguous: bool) -> float:
    numbers = random.Random(0)
    costs = [numbers.randint(1, 10**6) for _ in range(num_atoms)]
    if heaviest:
        costs[num_atoms // 2] = int(sum(costs) * heaviest)
    line = Line(tuple(costs), tuple(numbers.randint(1, 100) for _ in costs))
    stages, seconds = _timed(lambda: balance(line, num_stages, contiguous=contiguous))
    assert score(line, stages, num_stages)[0] == 0
    return seconds


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    found = call()
    return found, time.process_time() - start
