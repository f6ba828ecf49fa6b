"""Objects that recorded code reads and that cannot be given back to it: they must stay as they are.

A call is recorded with the plain values at its places and runs with them (:mod:`.places`). Lists of objects,
tensors, deep structures have no such places: whether they change between the call and its run is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .containers import MISSING
from .parts import is_opaque
from .places import PlacesRead
from .python_state import PythonState

__all__ = ["ReadBetween"]

_METHODS = vars(torch.Tensor)
_OF_PYTHON = frozenset(_METHODS)
_OF_C = frozenset(dir(torch.Tensor)) - _OF_PYTHON
_PASSED_OVER = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, nn.Parameter)


class ReadBetween:
    """Copies of what calls read that have been recorded and have not run."""

    def __init__(self) -> None:
        self._known: dict[int, PlacesRead] = {}  # by id
        self._copies: dict[int, tuple[Any, PythonState]] = {}  # by id of the object
        self._bindings: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._rebound: str | None = None  # what another call found other than before
        self._patched = patched_methods()

    def clear(self) -> None:
        """What was recorded has run, or never will."""
        self._known.clear()
        self._copies.clear()
        self._bindings.clear()
        self._rebound = None

    def look(self, places: PlacesRead) -> None:
        """A call is recorded that reads this."""
        if not self._known:
            self._patched = patched_methods()
        elif patched_methods() != self._patched:
            self._rebound = "exchanges methods of torch.Tensor"
        if id(places) in self._known:
            for namespace, name in places.functions:
                if namespace.get(name, MISSING) is not self._bindings[id(namespace), name][2]:
                    self._rebound = f"sets {name}"
            return
        self._known[id(places)] = places
        for value, name in places.objects:
            if id(value) not in self._copies:
                state = PythonState(lambda found: isinstance(found, _PASSED_OVER), only_compares=True)
                state.add(value, name)
                self._copies[id(value)] = (value, state)
        for namespace, name in places.functions:
            self._bindings.setdefault((id(namespace), name), (namespace, name, namespace.get(name, MISSING)))

    def opaque(self) -> str | None:
        """Something among it that nobody can look into without taking from it: an iterator, a queue."""
        for places in self._known.values():
            held = [(place.name, place.value()) for place in places.places]
            held += [(name, namespace.get(name)) for namespace, name in places.functions]
            for name, value in held:
                if is_opaque(value):
                    return f"{name}, a {type(value).__name__}"
        return next((name for _, state in self._copies.values() for name in state.opaque), None)

    def changed(self) -> str | None:
        """The first thing that is no longer as it was, in words."""
        if self._rebound is not None:
            return self._rebound
        if self._known and patched_methods() != self._patched:
            return "exchanges methods of torch.Tensor"
        for namespace, name, old in self._bindings.values():
            if namespace.get(name, MISSING) is not old:
                return f"sets {name}"
        texts = (state.changed() for _, state in self._copies.values())
        return next((text for text in texts if text is not None), None)


def patched_methods() -> dict[str, Any]:
    """Methods of tensors that a script has put in the places of those that are written in C."""
    if len(_METHODS) == len(_OF_PYTHON):
        return {}
    return {key: _METHODS[key] for key in _METHODS.keys() - _OF_PYTHON if key in _OF_C}
