"""A simulated step as a picture: a row for each stage, a block for each action, time to the right.

The reader compares blocks, so the encoding is one thing at a time: colour family says forward
(blue), backward (orange: colour-blind readers tell the two apart) or, where they run apart from it,
gradients of parameters (grey-green, the dullest, since nobody waits for them); shade says early or late
microbatch, the number in the block says which. Idle time is the white that is left. Numbers that
do not fit into their block are left out, not shrunk beyond reading.

matplotlib is an extra and used without pyplot: no global figure, no backend to choose, no window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan.step.actions import ActionKind
from ..plan.step.memory import StageMemory
from ..plan.step.schedule_text import short_name, step_figures
from ..plan.step.simulate import Simulation, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_legend", "draw_schedule", "draw_stage"]

_FAMILIES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "gradients of parameters",
}
# The ends of each ramp, first microbatch to last, as red, green, blue.
_RAMPS = {
    ActionKind.FORWARD: ((0.78, 0.88, 0.97), (0.06, 0.30, 0.58)),
    ActionKind.BACKWARD: ((1.00, 0.87, 0.66), (0.78, 0.33, 0.02)),
    ActionKind.WEIGHT: ((0.86, 0.92, 0.84), (0.24, 0.42, 0.30)),
}
_BLOCK_HEIGHT = 0.86  # of a row
_ROW_IN, _MIN_ROW_IN = 0.5, 0.3
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.75, 1.75, 0.8, 1.05
_INCHES_PER_ACTION = 0.45
_MIN_WIDTH_IN, _MAX_WIDTH_IN = 6.0, 30.0
_MIN_FONT_PT, _MAX_FONT_PT = 4.5, 9.0
_DIGIT_EMS = 0.68  # width of a digit and its share of the margin, over the font size
_MIN_EDGED_PT = 2.0
_INCHES_PER_TICK = 1.0
_DPI = 150
_LEGEND_PATCH_IN, _LEGEND_LETTER_IN = 0.85, 0.067
_MARGIN_COLUMNS_PT = (36, 100)  # right ends of the columns beside the rows


def draw_schedule(
    simulation: Simulation,
    path: str | PathLike[str],
    *,
    title: str = "",
    time_unit: str = "cost units",
    memory: Sequence[StageMemory] = (),
) -> Path:
    """Writes the picture; the suffix of ``path`` says how (``.png``, ``.svg``, ``.pdf``).

    Args:
        simulation: the step.
        path: file to write; its folder must exist.
        title: above the picture.
        time_unit: what the costs were counted in.
        memory: each stage's peak, to be written beside its row; none: not known.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing a schedule needs matplotlib: pip install "smp-lite[plot]", '
            "or read the same schedule as text"
        ) from error

    num_stages = len(simulation.timings)
    row_in = _ROW_IN if num_stages <= 8 else max(_MIN_ROW_IN, _ROW_IN * 8 / num_stages)
    width_in = _time_axis_in(simulation)
    figure_width_in = _LEFT_IN + width_in + _RIGHT_IN
    figure_height_in = _TOP_IN + max(num_stages, 1) * row_in + _BOTTOM_IN
    figure = Figure(figsize=(figure_width_in, figure_height_in), dpi=_DPI)
    axes = figure.add_axes(
        (
            _LEFT_IN / figure_width_in,
            _BOTTOM_IN / figure_height_in,
            width_in / figure_width_in,
            max(num_stages, 1) * row_in / figure_height_in,
        )
    )
    points_per_unit = 72 * width_in / (simulation.makespan or 1)
    num_microbatches = 1 + max(
        (t.action.microbatch_index for stage in simulation.timings for t in stage), default=0
    )
    for stage_index, timings in enumerate(simulation.timings):
        draw_stage(axes, stage_index, timings, num_microbatches, points_per_unit, 72 * row_in)
    _draw_axes(axes, simulation, time_unit, num_ticks=int(width_in / _INCHES_PER_TICK))
    _draw_margin(axes, simulation, title, time_unit, memory)
    draw_legend(figure, num_microbatches, {t.action.kind for stage in simulation.timings for t in stage})
    figure.savefig(path)
    return Path(path)


def _time_axis_in(simulation: Simulation) -> float:
    """Inches of the time axis, for the stage that has most to show."""
    num_actions = max(map(len, simulation.timings), default=0)
    return min(max(_INCHES_PER_ACTION * num_actions, _MIN_WIDTH_IN), _MAX_WIDTH_IN)


def draw_stage(
    axes: Axes,
    stage_index: int,
    timings: tuple[Timing, ...],
    num_microbatches: int,
    points_per_unit: float,
    row_pt: float,
) -> None:
    """The blocks of one row."""
    colours = [_colour(t, num_microbatches) for t in timings]
    widths_pt = [(t.end - t.start) * points_per_unit for t in timings]
    # A white edge would swallow the shortest blocks.
    edges = ["white" if w > _MIN_EDGED_PT else c for w, c in zip(widths_pt, colours)]
    axes.broken_barh(
        [(t.start, t.end - t.start) for t in timings],
        (stage_index - _BLOCK_HEIGHT / 2, _BLOCK_HEIGHT),
        facecolors=colours,
        edgecolors=edges,
        linewidth=0.5,
    )
    for timing, colour, width_pt in zip(timings, colours, widths_pt):
        # Later visits of a stage carry their number, where there is room for it.
        name = short_name(timing)[1:]
        for text in (name, name.partition(".")[0]):
            size_pt = min(width_pt / (_DIGIT_EMS * len(text)), 0.6 * row_pt, _MAX_FONT_PT)
            if size_pt >= _MIN_FONT_PT:
                axes.text(
                    (timing.start + timing.end) / 2,
                    stage_index,
                    text,
                    size=size_pt,
                    color="black" if _luminance(colour) > 0.45 else "white",
                    ha="center",
                    va="center_baseline",
                )
                break


def _colour(timing: Timing, num_microbatches: int) -> tuple[float, float, float]:
    share = timing.action.microbatch_index / max(num_microbatches - 1, 1)
    return _shade(timing.action.kind, share)


def _shade(kind: ActionKind, share: float) -> tuple[float, float, float]:
    light, dark = _RAMPS[kind]
    red, green, blue = (a + share * (b - a) for a, b in zip(light, dark))
    return red, green, blue


def _luminance(colour: tuple[float, float, float]) -> float:
    """Brightness as the eye weighs it (Rec. 709), 0 to 1."""
    red, green, blue = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _draw_axes(axes: Axes, simulation: Simulation, time_unit: str, num_ticks: int) -> None:
    num_stages = len(simulation.timings)
    axes.set_xlim(0, simulation.makespan or 1)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {index}" for index in range(num_stages)], size=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the step began ({time_unit})", size=9, loc="left")
    axes.locator_params(axis="x", nbins=num_ticks)
    axes.tick_params(axis="x", labelsize=8)
    for boundary in range(1, num_stages):
        axes.axhline(boundary - 0.5, color="0.85", linewidth=0.5, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_color("0.85")


def _draw_margin(
    axes: Axes, simulation: Simulation, title: str, time_unit: str, memory: Sequence[StageMemory]
) -> None:
    """To the right of each row how idle that stage is and what it needs; above, the whole step."""
    columns = [("idle", [f"{_idle_share(simulation, busy):.0%}" for busy in simulation.busy])]
    if memory:
        columns.append(("peak\nmemory", [stage.total_text for stage in memory]))
    for offset_pt, (header, texts) in zip(_MARGIN_COLUMNS_PT, columns):
        for row, text in enumerate([header, *texts], start=-1):
            axes.annotate(
                text,
                (1, row if row >= 0 else -0.5),
                xycoords=("axes fraction", "data"),
                xytext=(offset_pt, 0 if row >= 0 else 4),
                textcoords="offset points",
                ha="right",
                va="center_baseline" if row >= 0 else "bottom",
                size=9,
                color="black" if row >= 0 else "0.35",
            )
    makespan, work, idle = step_figures(simulation, time_unit)
    lines = (
        title,
        f"{makespan[0]}: {makespan[1]}",
        f"{work[0]}: {work[1]}; {idle[0]}: {idle[1]} of their time",
    )
    axes.set_title("\n".join(filter(None, lines)), loc="left", size=10)


def _idle_share(simulation: Simulation, busy: float) -> float:
    return 1 - busy / simulation.makespan if simulation.makespan else 0.0


def draw_legend(figure: Figure, num_microbatches: int, drawn: Collection[ActionKind]) -> None:
    """What the colours of these kinds mean, below the rows."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    kinds = [kind for kind in _FAMILIES if kind is not ActionKind.WEIGHT or kind in drawn]
    last = num_microbatches - 1
    span = f"microbatches 0 to {last}" if last else "microbatch 0"
    # Any: matplotlib's own types do not know that a handle may be a tuple.
    handles: list[Any] = [
        tuple(Patch(color=_shade(kind, share)) for share in (0, 0.25, 0.5, 0.75, 1)) for kind in kinds
    ]
    labels = [f"{_FAMILIES[kind]}, {span}" for kind in kinds]
    handles.append((Patch(facecolor="white", edgecolor="0.6"),))
    labels.append("idle")
    width_in = sum(_LEGEND_PATCH_IN + _LEGEND_LETTER_IN * len(label) for label in labels)
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=4,
        loc="lower left",
        bbox_to_anchor=(_LEFT_IN / figure.get_figwidth(), 0.01),
        ncols=len(labels) if _LEFT_IN + width_in <= figure.get_figwidth() else 2,
        frameon=False,
        fontsize=9,
    )
