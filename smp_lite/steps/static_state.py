"""What a recorded step takes as given under ``static_mode``, beside its inputs and the numbers in tensors.

A replay runs neither the step function nor the model's own code between the calls that stages run, so what
these have read must be as it was, or the step is recorded anew: attributes of modules, what they hold,
whether they train, which parameters have gradients, globals, closures, objects. What the step function itself
changes on its way (a counter, a list that it appends to) a replay leaves as it is, since the function does
not run: that is what ``static_mode`` promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..record.code.reads import places_reached, places_read
from ..record.code.watch import Names
from ..record.commands.recording import Recording
from ..record.state.between import ReadBetween
from ..record.state.containers import same_plain
from ..record.state.places import PLAIN, PlacesRead
from ..record.state.python_state import PythonState

__all__ = ["Surroundings"]

_OWN_TABLES = ("_parameters",)
"""Placed parameters come and go; whether they have gradients is looked at by itself."""


class Surroundings:
    """Args:
    module: the model's.
    function: the step function.
    names: what the model's code mentions that has run.
    recordings: of the step.
    given: objects among its arguments that may change in place.
    watches_closed: attributes of modules that stages run count too. Their code runs with what they hold, but
        something may have been learned of it (:mod:`..runtime.weights`).
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        names: Names,
        recordings: Iterable[Recording],
        given: Iterable[Any] = (),
        *,
        watches_closed: bool = False,
    ) -> None:
        closed = (
            set()
            if watches_closed
            else {
                id(part)
                for recording in recordings
                for called in {
                    id(c.module): c.module for c in recording.commands if c.module is not None
                }.values()
                for part in called.modules()
            }
        )
        self._modules = list(module.modules())
        self._containers = [part for part in self._modules if id(part) not in closed]
        self._parameters = list(module.parameters())
        self._flags = self._flags_now()
        self._held = self._held_now()
        self._places: list[PlacesRead] = [places_read(module, names), places_reached([function])]
        self._seen = [places.look() for places in self._places]
        self._objects = ReadBetween()
        for places in self._places:
            self._objects.look(places)
        own = set(map(id, self._modules))
        self._given = PythonState(
            lambda found: id(found) in own or isinstance(found, torch.optim.Optimizer), only_compares=True
        )
        for value in given:
            if isinstance(value, nn.Module) and id(value) not in own:
                self._given.add([*value.parameters(), *value.buffers()], "an argument")
            self._given.add(value, "an argument")

    def have_changed(self) -> bool:
        """Whether a replay could differ from recording the step anew."""
        return (
            self._flags != self._flags_now()
            or not _alike(self._held, self._held_now())
            or any(places.look() is not seen for places, seen in zip(self._places, self._seen, strict=True))
            or self._objects.changed() is not None
            or self._given.changed() is not None
        )

    def _flags_now(self) -> list[bool]:
        return [part.training for part in self._modules] + [p.requires_grad for p in self._parameters]

    def _held_now(self) -> list[Any]:
        """Attributes of the modules whose own code has run in recording, with their keys."""
        found: list[Any] = []
        for part in self._containers:
            for key, value in part.__dict__.items():
                if key in _OWN_TABLES:
                    continue
                found.append(key)
                if isinstance(value, dict) and key.startswith("_"):  # buffers, parts, hooks
                    for entry in value.items():
                        found += entry
                else:
                    found.append(value)
        return found


def _alike(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (isinstance(a, PLAIN) and same_plain(a, b)) for a, b in zip(old, new, strict=True)
    )
