"""The schedule as text: a staircase of a simulated step, and the plain lists.

The staircase is the drawing of the pipeline papers (GPipe, PipeDream, Megatron-LM), for a terminal:
a row for each stage, time from left to right on one scale for all rows, each action's name where it
starts, its block as long as it takes, dots where the stage is idle. The stage is the row, so its
number is left out of the names (``F0`` instead of ``2F0``)::

    stage 0  F0 F1 F2 F3 ..................B0    F4 B1    F5 B2
    stage 1  ...F0 F1 F2 .........B0    F3 B1    F4 B2    F5 B3

A scale on which the shortest action holds its name makes the equal chain come out like that. Very
short actions are not allowed to stretch it: below an eighth of the longest they show their letter.
A drawing wider than the terminal continues below, as a score of music does.
"""

from __future__ import annotations

from .actions import ActionKind
from .lowering import Schedule
from .simulate import Simulation, Timing

__all__ = ["compute_lists", "schedule_text", "short_name", "step_figures"]

_MOST_STRETCH = 8
_MIN_WIDTH = 40


def short_name(timing: Timing) -> str:
    """The action without its stage: ``F0``, ``B12``, ``F0.1``."""
    return str(timing.action).removeprefix(str(timing.action.stage_index))


def schedule_text(simulation: Simulation, width: int | None = None, *, time_unit: str = "cost units") -> str:
    """Draws a simulated step; lines end without blanks, and there is no newline at the end.

    Args:
        simulation: the step.
        width: most columns of a line of the drawing, at least 40; a longer drawing is continued
            below. None: no bound.
        time_unit: what the costs were counted in.
    """
    if width is not None and width < _MIN_WIDTH:
        raise ValueError(f"width is {width}: give a schedule {_MIN_WIDTH} columns or more, or None")
    scale = _columns_per_unit(simulation)
    num_columns = int(simulation.makespan * scale + 0.5)
    gutters = [f"stage {index}" for index in range(len(simulation.timings))]
    gutter_width = max(map(len, gutters), default=0)
    rows = [_row(stage, scale, num_columns) for stage in simulation.timings]
    room = num_columns if width is None else width - gutter_width - 2
    systems = []
    for begin, end in _cuts(simulation, scale, num_columns, room):
        lines = [f"{gutter:>{gutter_width}}  {row[begin:end]}".rstrip() for gutter, row in zip(gutters, rows)]
        systems.append("\n".join(lines))
    return "\n\n".join([*systems, _summary(simulation, scale, time_unit)])


def compute_lists(schedule: Schedule) -> str:
    """For each stage, on one line, what it computes: ``0F0 0F1 0B0 0B1``."""
    return "\n".join(
        " ".join(str(action) for action in actions if action.value is None) for actions in schedule
    )


def _columns_per_unit(simulation: Simulation) -> float:
    lengths = [t.end - t.start for stage in simulation.timings for t in stage]
    longest = max(lengths, default=0.0)
    if not longest:
        return 0.0
    label = max(len(short_name(t)) for stage in simulation.timings for t in stage)
    shortest = max(min(lengths), longest / _MOST_STRETCH)
    return (label + 1) / shortest


def _row(timings: tuple[Timing, ...], scale: float, num_columns: int) -> str:
    row = ["."] * num_columns
    for timing in timings:
        begin, end = _extent(timing, scale)
        row[begin:end] = _label(timing, scale).ljust(end - begin)
    return "".join(row[:num_columns])


def _extent(timing: Timing, scale: float) -> tuple[int, int]:
    """First column and the one after the last; the shortest action has one column too."""
    begin = int(timing.start * scale + 0.5)
    return begin, max(int(timing.end * scale + 0.5), begin + 1)


def _label(timing: Timing, scale: float) -> str:
    """The name where it fits, else its letter."""
    begin, end = _extent(timing, scale)
    name = short_name(timing)
    return name if len(name) <= end - begin else name[0]


def _cuts(simulation: Simulation, scale: float, num_columns: int, room: int) -> list[tuple[int, int]]:
    """Column ranges of at most ``room``, cut if possible where no row has a name across the cut."""
    blocked: set[int] = set()
    for stage in simulation.timings:
        for timing in stage:
            begin, _ = _extent(timing, scale)
            blocked.update(range(begin + 1, begin + len(_label(timing, scale))))
    ranges = []
    begin = 0
    while num_columns - begin > room:
        latest = begin + room
        end = next((c for c in range(latest, begin + room // 2, -1) if c not in blocked), latest)
        ranges.append((begin, end))
        begin = end
    return [*ranges, (begin, num_columns)]


def step_figures(simulation: Simulation, time_unit: str) -> list[tuple[str, str, str]]:
    """(figure, its value, what it is) of a step as a whole."""
    return [
        (
            "makespan of one step",
            f"{simulation.makespan:.4g} {time_unit}",
            "from the start of its first action to the end of its last one",
        ),
        ("work of all stages", f"{simulation.work:.4g} {time_unit}", "their forwards and backwards together"),
        ("idle", f"{simulation.idle_share:.1%}", "of the stages' time within the makespan"),
    ]


def _summary(simulation: Simulation, scale: float, time_unit: str) -> str:
    figures = step_figures(simulation, time_unit)
    name_width, value_width = (max(len(figure[column]) for figure in figures) for column in (0, 1))
    lines = [f"{name:<{name_width}}  {value:<{value_width}}  {meaning}" for name, value, meaning in figures]
    unnamed = [
        timing.action.kind
        for stage in simulation.timings
        for timing in stage
        if _label(timing, scale) != short_name(timing)
    ]
    if unnamed:
        letters = "F, B or W" if ActionKind.WEIGHT in unnamed else "F or B"
        lines.append(f"too short for their name: {len(unnamed)} actions, drawn as {letters}")
    return "\n".join(lines)
