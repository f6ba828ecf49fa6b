"""What is known of a value in the code around split layers: whose features it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .styles import Style

__all__ = [
    "FLAT",
    "LAST",
    "NONE",
    "PACKED",
    "PART",
    "ROW",
    "SIZED",
    "TRAINED",
    "WIDTH",
    "Marks",
    "cuts_last",
    "given_by",
    "own_name",
    "sizes_at",
    "sizes_of",
    "union_of",
]

PART, FLAT, PACKED, TRAINED, ROW = "part", "flat", "packed", "trained", "row"
"""Marks of values: this rank's features; features still in the last dimension; parts
of several matrices there, which may be cut; whole, with a gradient; a bare
weight that is split by input features."""

SIZED, LAST, WIDTH = "sized", "last", "width"
"""Of sizes, and of what is made in them: some are those of a part; the last of these sizes is. A number that
counts this rank's features."""

Marks = frozenset[str]
NONE: Marks = frozenset()


def own_name(node: ast.AST) -> str | None:
    """``a.b`` of ``self.a.b``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" and names else None


def cuts_last(index: ast.expr) -> bool:
    """Whether an index takes a range of the last dimension, as far as one can see: ``[..., a:b]``."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    last = parts[-1]
    whole = isinstance(last, ast.Slice) and last.lower is None and last.upper is None
    started = len(parts) > 1 and isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis
    return started and isinstance(last, ast.Slice) and not whole


def given_by(style: Style) -> Marks:
    return frozenset({PART, FLAT if style.packed == 1 else PACKED})


def union_of(given: Iterable[Marks]) -> Marks:
    return frozenset().union(*given)


def sizes_of(value: Marks) -> Marks:
    """``.shape`` of a value. Nobody splits the first dimension, the batch."""
    if PART in value:
        return frozenset({LAST if value & {FLAT, PACKED} else SIZED})
    return value & {SIZED, LAST}


def sizes_at(sizes: Marks, index: ast.expr) -> Marks:
    """One of such sizes, or a range of them, as far as one can see."""
    try:
        place = ast.literal_eval(index)
    except ValueError:
        place = None
    is_slice = isinstance(index, ast.Slice)
    if LAST in sizes:
        before_last = is_slice and index.upper is not None and ast.unparse(index.upper) == "-1"
        if before_last or (isinstance(place, int) and place < -1):
            return NONE
    if place == 0 or (is_slice and index.upper is not None and ast.unparse(index.upper) == "1"):
        return NONE
    if LAST in sizes and place == -1:
        return frozenset({SIZED, WIDTH})
    return sizes if is_slice else frozenset({SIZED})
