"""Objects that recorded code reads and that cannot be given back to it: they must stay as they are.

A call is recorded with the plain values at its places and runs with them (:mod:`.places`). Lists of objects,
tensors, deep structures have no such places: whether they change between the call and its run is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .containers import MISSING
from .places import PlacesRead
from .python_state import PythonState

__all__ = ["ReadBetween"]

_PASSED_OVER = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, nn.Parameter)


class ReadBetween:
    """Copies of what calls read that have been recorded and have not run."""

    def __init__(self) -> None:
        self._known: dict[int, PlacesRead] = {}  # by id
        self._copies: dict[int, tuple[Any, PythonState]] = {}  # by id of the object
        self._bindings: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

    def clear(self) -> None:
        """What was recorded has run, or never will."""
        self._known.clear()
        self._copies.clear()
        self._bindings.clear()

    def look(self, places: PlacesRead) -> None:
        """A call is recorded that reads this."""
        if id(places) in self._known:
            return
        self._known[id(places)] = places
        for value, name in places.objects:
            if id(value) not in self._copies:
                state = PythonState(lambda found: isinstance(found, _PASSED_OVER), only_compares=True)
                state.add(value, name)
                self._copies[id(value)] = (value, state)
        for namespace, name in places.functions:
            self._bindings.setdefault((id(namespace), name), (namespace, name, namespace.get(name, MISSING)))

    def changed(self) -> str | None:
        """The first thing that is no longer as it was, in words."""
        for namespace, name, old in self._bindings.values():
            if namespace.get(name, MISSING) is not old:
                return f"sets {name}"
        texts = (state.changed() for _, state in self._copies.values())
        return next((text for text in texts if text is not None), None)
