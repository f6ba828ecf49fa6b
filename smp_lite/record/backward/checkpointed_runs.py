"""Modules that are recorded as one checkpointed call: each run is made once and known to the placement."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..describe.checkpointed_calls import CheckpointedRun
from ..parameters.placement import Placement

__all__ = ["CheckpointedRuns"]


class CheckpointedRuns:
    """The runs of one placement."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._made: dict[tuple[object, ...], CheckpointedRun] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

    def of(self, modules: Sequence[nn.Module], *, preserve_rng_state: bool) -> CheckpointedRun:
        """The run of these modules, which lie on one stage."""
        key = (preserve_rng_state, *map(id, modules))  # the run keeps them alive, so ids stay theirs
        run = self._made.get(key)
        if run is None:
            run = self._made[key] = CheckpointedRun(modules, preserve_rng_state)
            first, last = (self.placement.name(modules[i]) for i in (0, -1))
            name = f"{first} (checkpointed)" if len(modules) == 1 else f"{first} to {last} (checkpointed)"
            self.placement.add_run(run, name, list(modules))
        return run
