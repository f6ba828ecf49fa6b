"""How a model's modules came to be split, for ``smp-lite plan`` and ``check``, which tell a person."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["Origin", "Split", "note_split", "split_of"]

Origin = Literal["derived", "known", "shipped", "given", "configured"]

_ORIGINS: dict[Origin, str] = {
    "derived": "derived, since none came with it: pairs of linear layers with nothing but elementwise "
    "functions between them",
    "known": "ours for this architecture, since none came with the model",
    "shipped": "the one that comes with the model",
    "given": "the one that the script gives",
    "configured": "as the configuration says for each layer",
}


@dataclass(frozen=True)
class Split:
    """The tensor-parallel plan of one model.

    Attributes:
        origin: who made it.
        styles: of every module that was changed, by its full name.
    """

    origin: Origin
    styles: Mapping[str, str]

    @property
    def origin_text(self) -> str:
        """For a person."""
        return _ORIGINS[self.origin]

    def lines(self) -> list[str]:
        """``blocks.*.up: colwise (4 modules)``: names that differ only in their numbers are one line."""
        found: dict[tuple[str, str], int] = {}
        for name, style in self.styles.items():
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
            found[pattern, style] = found.get((pattern, style), 0) + 1
        return [
            f"{pattern}: {style}" + (f" ({count} modules)" if count > 1 else "")
            for (pattern, style), count in found.items()
        ]


_splits: weakref.WeakKeyDictionary[nn.Module, Split] = weakref.WeakKeyDictionary()


def note_split(module: nn.Module, split: Split) -> None:
    """Says how a module's parts were split."""
    _splits[module] = split


def split_of(root: nn.Module) -> Split | None:
    """Of a whole model, or of the parts of it that were split for themselves; None: nothing was."""
    found = [(name, _splits[part]) for name, part in root.named_modules() if part in _splits]
    if not found:
        return None
    styles = {
        f"{prefix}.{name}" if prefix else name: style
        for prefix, split in found
        for name, style in split.styles.items()
    }
    return Split(found[0][1].origin, styles)
