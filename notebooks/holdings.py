"""A picture of who holds what: which rank has which part of which weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

__all__ = ["check_holdings", "draw_holdings"]

_PART_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""Of Okabe and Ito, as in the other pictures."""
_WHOLE_COLOUR = "0.45"
_CELL = 0.8
"""Of a column and row, the rest is between them."""

Ranks = Sequence[Sequence[Mapping[str, Any]]]
"""For each rank the parameters that it holds, as train_systems.py writes them."""


def check_holdings(ranks: Ranks, shapes: Mapping[str, Sequence[int]]) -> None:
    """
    Raises:
        ValueError: some part of a weight lies on no rank, or a rank holds what the model has not.
    """
    covered = {name: torch.zeros(tuple(shape), dtype=torch.bool) for name, shape in shapes.items()}
    for held in ranks:
        for entry in held:
            name = entry["name"]
            if entry["shape"] != list(shapes[name]):
                raise ValueError(f"{name} has another shape: {entry['shape']}")
            for offsets, sizes in entry["boxes"]:
                covered[name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = True
    for name, is_held in covered.items():
        if not is_held.all():
            raise ValueError(f"{name}: {int((~is_held).sum())} numbers lie on no rank")


def draw_holdings(systems: Mapping[str, Ranks], shapes: Mapping[str, Sequence[int]]) -> Figure:
    """A block of rows for each system, a row for each rank, a column for each matrix of the model.

    A box is the whole matrix, its rows from top to bottom; what is filled lies on that rank. Parts of one
    matrix have a colour each, in their order in it. At the right: the share of the model's numbers that the
    rank holds, vectors (biases and norms) included.

    Args:
        systems: what ranks hold, by the system's name.
        shapes: of all parameters of the model, in its order.
    """
    names = [name for name, shape in shapes.items() if len(shape) == 2]
    total = sum(math.prod(shape) for shape in shapes.values())
    num_ranks = [len(ranks) for ranks in systems.values()]
    figure, all_axes = plt.subplots(
        len(systems),
        1,
        figsize=(11, 1.7 + sum(0.3 * n + 0.42 for n in num_ranks)),
        height_ratios=num_ranks,
        layout="constrained",
        squeeze=False,
    )
    num_parts = 1
    for (system, ranks), axes in zip(systems.items(), all_axes[:, 0], strict=True):
        parts = _parts(ranks)
        num_parts = max([num_parts, *map(len, parts.values())])
        for rank, held in enumerate(ranks):
            of_name = {entry["name"]: entry for entry in held}
            for column, name in enumerate(names):
                _draw_matrix(axes, rank, column, of_name.get(name), parts[name], shapes[name])
            share = sum(entry["numel"] for entry in held) / total
            axes.text(len(names) - 0.35, rank, f"{share:.0%}", size=9, va="center")
        axes.set_title(system, size=10, loc="left")
        axes.set_xlim(-0.6, len(names) + 0.5)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], size=8)
        axes.set_xticks([])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        for column, name in enumerate(names):
            if column and _block(name) != _block(names[column - 1]):
                axes.axvline(column - 0.5, color="0.8", linewidth=0.8)
    all_axes[0, 0].text(len(names) - 0.35, -0.62, "share", size=9, va="bottom")
    _label_columns(all_axes[-1, 0], names, num_ranks[-1])
    colours = {f"part {part} of the matrix": _PART_COLOURS[part] for part in range(num_parts)}
    colours["all of it"] = _WHOLE_COLOUR
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    handles.append(Patch(facecolor="white", edgecolor="0.8", label="elsewhere"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _draw_matrix(
    axes: Axes,
    row: int,
    column: int,
    entry: Mapping[str, Any] | None,
    parts: Sequence[Any],
    shape: Sequence[int],
) -> None:
    left, top = column - _CELL / 2, row - _CELL / 2
    axes.add_patch(Rectangle((left, top), _CELL, _CELL, facecolor="white", edgecolor="0.8", linewidth=0.8))
    if entry is None:
        return
    part = parts.index(entry["boxes"])
    colour = _WHOLE_COLOUR if len(parts) == 1 else _PART_COLOURS[part]
    for offsets, sizes in entry["boxes"]:
        y, x = (_CELL * offset / size for offset, size in zip(offsets, shape, strict=True))
        height, width = (_CELL * n / size for n, size in zip(sizes, shape, strict=True))
        axes.add_patch(Rectangle((left + x, top + y), width, height, facecolor=colour))


def _parts(ranks: Ranks) -> dict[str, list[Any]]:
    """By name, the different parts that ranks hold, in their order in the matrix."""
    found: dict[str, list[Any]] = {}
    for held in ranks:
        for entry in held:
            parts = found.setdefault(entry["name"], [])
            if entry["boxes"] not in parts:
                parts.append(entry["boxes"])
    return {name: sorted(parts) for name, parts in found.items()}


def _label_columns(axes: Axes, names: Sequence[str], num_rows: int) -> None:
    labels = [name.removesuffix(".weight").removeprefix(f"{_block(name)}.") for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=45, ha="right", rotation_mode="anchor", size=8)
    axes.tick_params(axis="x", pad=18)
    for block in dict.fromkeys(filter(None, map(_block, names))):
        columns = [column for column, name in enumerate(names) if _block(name) == block]
        middle = sum(columns) / len(columns)
        axes.text(middle, num_rows - 0.42, block, size=9, ha="center", va="top")


def _block(name: str) -> str:
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "blocks" else ""
