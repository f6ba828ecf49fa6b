"""Objects that recorded code reads and that cannot be given back to it: they must stay as they are.

A call is recorded with the plain values at its places and runs with them (:mod:`.places`). Lists of objects,
tensors, deep structures have no such places: whether they change between the call and its run is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .python_state import PythonState

__all__ = ["ReadBetween"]

_PASSED_OVER = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, nn.Parameter)


class ReadBetween:
    """Copies of what calls read that have been recorded and have not run."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, PythonState]] = {}  # by id of the object

    def clear(self) -> None:
        """What was recorded has run, or never will."""
        self._copies.clear()

    def look(self, roots: Iterable[tuple[Any, str]]) -> None:
        """A call is recorded that reads these objects, each with its name."""
        for value, name in roots:
            if id(value) not in self._copies:
                state = PythonState(lambda found: isinstance(found, _PASSED_OVER), keeps_tensors=False)
                state.add(value, name)
                self._copies[id(value)] = (value, state)

    def changed(self) -> str | None:
        """The first thing that is no longer as it was, in words."""
        texts = (state.changed() for _, state in self._copies.values())
        return next((text for text in texts if text is not None), None)
