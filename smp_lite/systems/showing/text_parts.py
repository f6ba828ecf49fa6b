"""Small pieces of text that the tables of ``smp-lite explain`` share."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["WIDTH", "bullets", "dims_text", "group_text", "shortened"]

WIDTH = 110


def group_text(group: Sequence[int]) -> str:
    """Returns ``0-3``, ``0,2,4,6`` or, for many ranks an equal step apart, ``0,8,...,56``."""
    if len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1)):
        return f"{group[0]}-{group[-1]}"
    steps = {later - earlier for earlier, later in itertools.pairwise(group)}
    if len(group) > 4 and len(steps) == 1:
        return f"{group[0]},{group[1]},...,{group[-1]}"
    if len(group) > 8:
        return f"{','.join(map(str, group[:4]))},...,{group[-1]}"
    return ",".join(map(str, group))


def dims_text(dims: Sequence[Sequence[str]]) -> str:
    """Returns ``[fsdp x tensor, -]``: the axes of each dimension."""
    return f"[{', '.join(' x '.join(axes) if axes else '-' for axes in dims)}]"


def shortened(text: str, width: int) -> str:
    """Returns a text of at most ``width`` characters, without its middle where it is longer."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2 - 2]}...{text[len(text) - (width - width // 2 - 1) :]}"


def bullets(texts: Iterable[str]) -> str:
    """Returns the texts as a list, wrapped at :data:`WIDTH`."""
    return "\n".join(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in texts)
