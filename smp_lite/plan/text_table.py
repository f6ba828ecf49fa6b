"""Plain text tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["text_table"]


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
    left: Collection[str] = (),
) -> str:
    """Columns as wide as their widest cell; lines end without blanks, and there is no newline at the end.

    Args:
        header: above the columns; a rule follows.
        rows: cells by row.
        total: a last row, below another rule.
        left: headers of columns that are aligned to the left; the others are to the right.
    """
    last = [total] if total is not None else []
    widths = [max(map(len, column)) for column in zip(header, *rows, *last, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        for row in (header, *rows, *last)
    ]
    rule = "  ".join("-" * width for width in widths)
    lines.insert(1, rule)
    if last:
        lines.insert(-1, rule)
    return "\n".join(line.rstrip() for line in lines)
