"""Which parameters a batch of work trains, and which of those have no gradient all the same.

A backward may leave ``.grad`` of a parameter at None, where its module has not used it. Scripts ask
(``if p.grad is not None``), on every rank and of all parameters, so what the owner sees is told to the others
whenever it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...record.parameters.away import is_away
from ...record.parameters.placement import Placement
from .batches import Batch, Progress

__all__ = ["OwnGradients", "TrainedParameters"]

_MOST_KINDS_OF_STEPS = 256


@dataclass(frozen=True)
class OwnGradients:
    """Parameters of this rank that a backward could reach, and those of them that have no gradient."""

    own: frozenset[str]
    without: frozenset[str]


class TrainedParameters:
    """What is known of one model's steps, by kind of step; the same on all ranks of the mp group."""

    def __init__(self) -> None:
        self._trained_by: dict[Any, frozenset[str]] = {}
        self._lacking: dict[Any, frozenset[str]] = {}

    def of(
        self, batch: Batch, all_progress: Mapping[int, Progress], placement: Placement
    ) -> tuple[Any, frozenset[str]]:
        """A key for the modules that ran, and the parameters that the works' backwards can reach."""
        key = (id(batch), tuple([progress.recording.digest for progress in all_progress.values()]))
        if key in self._trained_by:
            return key, self._trained_by[key]
        if len(self._trained_by) > _MOST_KINDS_OF_STEPS:  # on all ranks at once: they record the same
            self._trained_by.clear()
            self._lacking.clear()
        found: set[str | None] = set()
        for work in batch.works:
            commands = all_progress[work.microbatch_index].recording.commands
            for segment in work.pending_backwards():
                for index in segment.commands:
                    command = commands[index]
                    found.add(command.parameter)
                    if command.module is not None:
                        found.update([placement.alias(p) for p in command.module.parameters()])
        self._trained_by[key] = frozenset(name for name in found if name is not None)
        return key, self._trained_by[key]

    def news(self, key: Any, trained: frozenset[str], placement: Placement) -> OwnGradients | None:
        """What the others do not know yet of this rank's; None: nothing."""
        own, without = [], []
        for full in trained:
            parameter = placement.parameter(full)
            if not is_away(parameter):
                own.append(full)
                if parameter.grad is None and parameter.requires_grad:
                    without.append(full)
        seen = OwnGradients(frozenset(own), frozenset(without))
        return seen if seen.without != self.lacking(key) & seen.own else None

    def learn(self, key: Any, told: Iterable[OwnGradients]) -> None:
        """What ranks have told, this one included."""
        known = self.lacking(key)
        for outcome in told:
            known = (known - outcome.own) | outcome.without
        self._lacking[key] = known

    def lacking(self, key: Any) -> frozenset[str]:
        """Those of the kind of step that have no gradient after it."""
        return self._lacking.get(key, frozenset())
