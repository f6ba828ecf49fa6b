"""What ``pipeline: auto`` has tried, below each other on one time axis: shorter is better, and can be seen.

The alternative that was taken has a dark frame and says so; one that was excluded has its reason in grey.
Blocks are those of :mod:`.schedule_picture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ..plan.choosing.choice import Choice, Outcome
from ..plan.step.simulate import Simulation, Timing
from .schedule_picture import draw_legend, draw_stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_alternatives"]

_MOST_ROWS = 48
_ROW_IN, _MIN_ROW_IN = 0.34, 0.2
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN, _GAP_IN = 0.75, 0.4, 0.4, 1.05, 0.42
_INCHES_PER_ACTION = 0.4
_MIN_WIDTH_IN, _MAX_WIDTH_IN = 9.5, 26.0  # reasons are long
_DPI = 150


def draw_alternatives(
    choice: Choice,
    path: str | PathLike[str],
    *,
    title: str = "",
    time_unit: str = "cost units",
    scale: float = 1.0,
    peak: Callable[[float], str] = "{:.4g}".format,
) -> Path:
    """Writes the picture; the suffix of ``path`` says how (``.png``, ``.svg``, ``.pdf``).

    Args:
        choice: the alternatives; of many stages the best ones, and the first one tried (1F1B).
        path: file to write; its folder must exist.
        title: above the picture.
        time_unit: what is written at the axis.
        scale: of that unit, in the unit of the costs.
        peak: how to write what a rank needs.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing schedules needs matplotlib: pip install "smp-lite[plot]", or read the table instead'
        ) from error

    shown = _shown(choice)
    simulations = [_scaled(outcome.simulation, scale) for outcome in shown]
    num_rows = [len(simulation.timings) for simulation in simulations]
    row_in = max(_MIN_ROW_IN, min(_ROW_IN, _ROW_IN * _MOST_ROWS / 2 / sum(num_rows)))
    longest = max(simulation.makespan for simulation in simulations)
    most = max(len(stage) for simulation in simulations for stage in simulation.timings)
    width_in = min(max(_INCHES_PER_ACTION * most, _MIN_WIDTH_IN), _MAX_WIDTH_IN)
    height_in = _TOP_IN + _BOTTOM_IN + sum(rows * row_in + _GAP_IN for rows in num_rows)
    figure = Figure(figsize=(_LEFT_IN + width_in + _RIGHT_IN, height_in), dpi=_DPI)
    figure.text(_LEFT_IN / figure.get_figwidth(), 1 - 0.2 / height_in, title, size=11, va="top")
    num_microbatches = 1 + max(t.action.microbatch_index for stage in simulations[0].timings for t in stage)
    top_in = height_in - _TOP_IN
    for outcome, simulation, rows in zip(shown, simulations, num_rows, strict=True):
        top_in -= _GAP_IN + rows * row_in
        axes = figure.add_axes(
            (
                _LEFT_IN / figure.get_figwidth(),
                top_in / height_in,
                width_in / figure.get_figwidth(),
                rows * row_in / height_in,
            )
        )
        for stage, timings in enumerate(simulation.timings):
            draw_stage(axes, stage, timings, num_microbatches, 72 * width_in / longest, 72 * row_in)
        is_last = outcome is shown[-1]
        _frame(axes, simulation, longest, is_taken=outcome is choice.best, is_last=is_last)
        text = f"{simulation.makespan:.4g} {time_unit}, idle {simulation.idle_share:.1%}"
        text = f"{outcome.alternative.name}: {text}, peak {peak(max(outcome.peaks, default=0.0))}"
        if outcome is choice.best:
            axes.set_title(f"{text} (taken)", loc="left", size=9.5, weight="bold")
        else:
            note = f"; excluded: {outcome.excluded}" if outcome.excluded else ""
            axes.set_title(text + note, loc="left", size=9.5, color="0.45" if note else "black")
        if is_last:
            axes.set_xlabel(f"time since the step began ({time_unit})", size=9, loc="left")
    draw_legend(
        figure,
        num_microbatches,
        {t.action.kind for simulation in simulations for stage in simulation.timings for t in stage},
    )
    figure.savefig(path)
    return Path(path)


def _shown(choice: Choice) -> Sequence[Outcome]:
    """As many as can be seen, 1F1B always."""
    outcomes = choice.outcomes
    num_stages = max(len(outcome.simulation.timings) for outcome in outcomes)
    number = max(2, _MOST_ROWS // num_stages)
    shown = list(outcomes[:number])
    base = next((o for o in outcomes if o.alternative.policy.pipeline == "interleaved"), shown[0])
    return shown if base in shown else [*shown[:-1], base]


def _scaled(simulation: Simulation, scale: float) -> Simulation:
    timings = tuple(
        tuple(Timing(action, start / scale, end / scale) for action, start, end in stage)
        for stage in simulation.timings
    )
    busy = tuple(seconds / scale for seconds in simulation.busy)
    return replace(simulation, timings=timings, makespan=simulation.makespan / scale, busy=busy)


def _frame(axes: Axes, simulation: Simulation, longest: float, *, is_taken: bool, is_last: bool) -> None:
    num_stages = len(simulation.timings)
    axes.set_xlim(0, longest)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {index}" for index in range(num_stages)], size=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, labelbottom=is_last)
    axes.axvline(simulation.makespan, color="0.4", linewidth=0.8, linestyle=":")
    for boundary in range(1, num_stages):
        axes.axhline(boundary - 0.5, color="0.85", linewidth=0.5, zorder=0)
    for spine in axes.spines.values():
        spine.set_color("0.1" if is_taken else "0.85")
        spine.set_linewidth(2.0 if is_taken else 0.8)
