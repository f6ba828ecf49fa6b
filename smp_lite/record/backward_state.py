"""The Python state that a backward pass reads: that of the moment when ``model.backward()`` was called.

Hooks, backwards of autograd functions and what a checkpoint computes again are Python code. In one process
they run within ``model.backward()``; here they run later, when the step function may have set attributes,
globals or dicts for other microbatches. So that moment's state is noted, and is in force while the backward
of that microbatch runs. Steps without such code note nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .recording import Recording
from .state.places import ModuleAttribute, Place, PlacesRead
from .state.reads import places_of_class, places_of_functions

__all__ = ["BackwardState", "there"]

_OURS = ("torch", __name__.partition(".")[0])


class BackwardState:
    """What backward code of one recorder's model reads.

    Attributes:
        runs_python: whether any such code has been met.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.runs_python = False
        self._of_classes: dict[type, PlacesRead] = {}
        self._of_hooks: PlacesRead | None = None  # of this step
        self._called: list[Recording] = []  # microbatches of this step that have called model.backward()

    def begin_step(self) -> None:
        self._of_hooks = None
        self._called.clear()

    def meet(self, cls: type[torch.autograd.Function]) -> PlacesRead:
        """An autograd function is used, here or inside a closed call."""
        places = self._of_classes.get(cls)
        if places is None:
            own = cls.__module__.partition(".")[0] in _OURS
            places = self._of_classes[cls] = PlacesRead([]) if own else places_of_class(cls)
            self.runs_python |= not own
        return places

    def note(self, recording: Recording, of_modules: Iterable[PlacesRead]) -> None:
        """``model.backward()`` is called now."""
        if self._of_hooks is None:
            hooks = list(_hooks_of(self._root))
            self.runs_python |= bool(hooks)
            self._of_hooks = places_of_functions(hooks)
        if not self.runs_python:
            return
        read = [*self._of_classes.values(), self._of_hooks, *of_modules]
        recording.backward_reads = [(places, places.look()) for places in read if places.places]
        recording.backward_attributes = {}
        self._called.append(recording)

    def attribute_set(self, module: nn.Module, name: str, old: Any) -> None:
        """An attribute is about to be set: backwards that have been called keep what it was."""
        for recording in self._called:
            place = ModuleAttribute(module, name)
            recording.backward_attributes.setdefault(place.identity, (place, old))


def there(recording: Recording) -> list[tuple[Place, Any]]:
    """What must be put in force while the microbatch's backward runs."""
    changed = [item for places, seen in recording.backward_reads for item in places.others_than_now(seen)]
    return [*changed, *recording.backward_attributes.values()]


def _hooks_of(root: nn.Module) -> Iterable[Any]:
    """Hooks on gradients that were put on modules and parameters."""
    for module in root.modules():
        for table in (module._backward_hooks, module._backward_pre_hooks):
            yield from table.values()
    for parameter in root.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield from (getattr(parameter, name, None) or {}).values()
