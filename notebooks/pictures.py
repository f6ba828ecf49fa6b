"""The notebooks' pictures: a timeline of real steps, ways to split a model, and losses on one another.

Colours are from the palette of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from planning import PlannedStep

__all__ = ["draw_losses", "draw_splits", "draw_timeline"]

_ACTION_COLOURS = {"forward": "#56B4E9", "backward": "#E69F00"}
_STAGE_COLOURS = ("#009E73", "#CC79A7", "#0072B2", "#D55E00")
_SYSTEM_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
_SYSTEM_MARKERS = ("o", "s", "^", "D", "v")
_ROW_IN = 0.5
_NARROWEST_WITH_NUMBER = 0.011  # of the picture's width


def draw_timeline(events: Iterable[Mapping[str, Any]], *, first_step: int, num_steps: int) -> Figure:
    """What each rank computed when: a row for each rank, replica by replica, a block for each action.

    Numbers in the blocks are microbatches; white is idle, or the optimizer's and the script's own time.

    Args:
        events: ``traceEvents`` of a timeline.json.
        first_step: where to begin; step 0 is much longer than the others.
        num_steps: how many to show.
    """
    events = list(events)
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = range(first_step, first_step + num_steps)
    computed = [event for event in events if event.get("cat") in _ACTION_COLOURS]
    blocks = [event for event in computed if event["args"]["step"] in steps]
    begin = min(block["ts"] for block in blocks)
    width = max(block["ts"] + block["dur"] for block in blocks) - begin
    rows = {track: row for row, track in enumerate(sorted(labels))}

    figure, axes = plt.subplots(figsize=(11, 1.2 + _ROW_IN * len(rows)), layout="constrained")
    for block in blocks:
        row = rows[block["pid"], block["tid"]]
        left_ms, width_ms = (block["ts"] - begin) / 1000, block["dur"] / 1000
        axes.barh(
            row, width_ms, left=left_ms, color=_ACTION_COLOURS[block["cat"]], edgecolor="white", linewidth=0.5
        )
        if block["dur"] > _NARROWEST_WITH_NUMBER * width:
            middle_ms = left_ms + width_ms / 2
            axes.text(middle_ms, row, block["args"]["microbatch"], ha="center", va="center", size=8)
    for step in steps:
        step_begin = min(block["ts"] for block in blocks if block["args"]["step"] == step)
        left_ms = (step_begin - begin) / 1000
        axes.axvline(left_ms, color="0.4", linewidth=0.8, linestyle=":")
        axes.text(left_ms, -0.55, f" step {step}", size=8, color="0.3", va="bottom")
    axes.set_yticks(list(rows.values()), [f"replica {pid}, {labels[pid, tid]}" for pid, tid in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, width / 1000)
    axes.set_xlabel("time (ms)")
    _bare(axes)
    _legend(figure, _ACTION_COLOURS)
    return figure


def draw_splits(splits: Mapping[str, PlannedStep]) -> Figure:
    """Ways to split one model: the stages' shares of memory and computation, and the simulated step.

    Args:
        splits: by name, in the order to show them.
    """
    num_stages = len(next(iter(splits.values())).stages)
    figure, (memory, compute, time) = plt.subplots(
        1, 3, sharey=True, figsize=(11, 1.3 + 0.4 * len(splits)), layout="constrained"
    )
    for row, split in enumerate(splits.values()):
        _draw_shares(memory, row, [stage.memory_share for stage in split.stages])
        _draw_shares(compute, row, [stage.compute_share for stage in split.stages])
        step_time = split.simulation.makespan
        time.barh(row, step_time, color="0.75")
        time.text(step_time, row, f" {split.simulation.idle_share:.0%} idle", size=8, va="center")
    for axes, title in ((memory, "share of the memory"), (compute, "share of the computation")):
        axes.set_title(title, size=10, loc="left")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter("{x:.0%}")
        for stage in range(1, num_stages):
            axes.axvline(stage / num_stages, color="black", linewidth=0.8, linestyle=":")
    time.set_title("simulated step (GFLOP)", size=10, loc="left")
    time.margins(x=0.25)
    memory.set_yticks(range(len(splits)), list(splits))
    memory.invert_yaxis()
    for axes in (memory, compute, time):
        _bare(axes)
    _legend(figure, {f"stage {stage}": _STAGE_COLOURS[stage] for stage in range(num_stages)})
    return figure


def _draw_shares(axes: Axes, row: int, shares: list[float]) -> None:
    left = 0.0
    for stage, share in enumerate(shares):
        axes.barh(row, share, left=left, color=_STAGE_COLOURS[stage], edgecolor="white")
        axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", size=8)
        left += share


def _bare(axes: Axes) -> None:
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, colours: Mapping[str, str]) -> None:
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False)


def draw_losses(
    alone: Sequence[float], again: Sequence[float], systems: Mapping[str, Sequence[float]]
) -> Figure:
    """Loss curves on one another, and beside them how far each lies from one process.

    Args:
        alone: of each step, in one process.
        again: the same with sums in another order: what rounding alone does.
        systems: by name, of each step.
    """
    figure, (curves, differences) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    curves.plot(alone, color="0.8", linewidth=7, label="one process", solid_capstyle="round")
    differences.plot(
        _apart(again, alone), color="0.7", linewidth=5, label="one process, batch in halves", zorder=1
    )
    for number, (name, losses) in enumerate(systems.items()):
        colour, marker = _SYSTEM_COLOURS[number], _SYSTEM_MARKERS[number]
        # Every system marks steps of its own: at one step they would hide one another.
        marked = list(range(number, len(losses), len(systems)))
        curves.plot(losses, marker, markevery=marked, color=colour, markersize=5, label=name)
        differences.plot(_apart(losses, alone), marker=marker, color=colour, markersize=4, linewidth=0.8)
    curves.set_title("loss (nats a byte)", size=10, loc="left")
    differences.set_title("distance from the loss of one process (millionths of a nat)", size=10, loc="left")
    for axes in (curves, differences):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _apart(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    return [1e6 * abs(loss - other) for loss, other in zip(losses, others, strict=True)]
