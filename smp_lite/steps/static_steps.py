"""Steps that are recorded once under ``static_mode``, and what decides whether they are replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..record.code.source_line import warn_once_at_user_line
from ..record.code.watch import Names
from ..record.commands.recording import Recording
from ..record.commands.replay import Differs, Tape
from .static_state import Surroundings

__all__ = ["Slot", "StaticStep", "StaticSteps"]

_MOST_DIFFERING = 3
_UNSEEN = (
    "static_mode: True, but this step is recorded every time: it uses {}, made in it, maybe where no "
    "torch function is seen (torch.vmap, torch.jit, another thread, an earlier microbatch)"
)
_DIFFERS = (
    "static_mode: True, but this step is recorded every time: tensors that it makes have other shapes for "
    "other numbers (x[mask]), or it looks at numbers that change"
)


class Slot:
    """An ordinary tensor in a step's result that a replay makes anew."""

    __slots__ = ("recorded", "slot")

    def __init__(self, slot: int, recorded: Any) -> None:
        self.slot, self.recorded = slot, recorded


@dataclass
class StaticStep:
    """What has been recorded of one kind of step.

    Attributes:
        outputs: leaves and form of each microbatch's result.
        names: that its code has mentioned.
        is_never_replayed: what it does cannot be repeated, or never comes out alike.
    """

    recordings: list[Recording] = field(default_factory=list)
    tapes: list[Tape] = field(default_factory=list)
    outputs: list[tuple[list[Any], Any]] = field(default_factory=list)
    has_backward: bool = False
    names: Names = field(default_factory=Names)
    is_never_replayed: bool = False
    _num_differing: int = 0  # times in a row that a replay came out in another form
    _surroundings: Surroundings | None = None

    def settle(self, model: Any, function: Callable[..., Any], given: Sequence[Any]) -> None:
        """The step has been recorded and has run.

        Args:
            model: that it calls.
            function: the step function.
            given: objects among its arguments that may change in place.
        """
        for tape in self.tapes:
            tape.forget_before()
        unseen = [tape.unseen for tape in self.tapes if tape.unseen is not None]
        if unseen:
            self._give_up(_UNSEEN.format(unseen[0]))
            return
        for leaves, _ in self.outputs:
            for leaf in leaves:
                if type(leaf) is Slot:
                    leaf.recorded = None
        self._surroundings = Surroundings(
            model.module,
            function,
            self.names,
            self.recordings,
            given,
            watches_closed=model.runtime.splits_backwards,
        )

    def have_surroundings_changed(self) -> bool:
        """Whether a replay could differ from recording the step anew."""
        return self._surroundings is None or self._surroundings.have_changed()

    def made_again(
        self, all_leaves: Sequence[list[Any]], before_change: Callable[[torch.Tensor], None]
    ) -> list[dict[int, Any]] | None:
        """What the tapes make of this step's inputs; None: the step must be recorded, nothing has changed.

        Args:
            all_leaves: of the arguments, microbatch by microbatch.
            before_change: hears of the tensors that were there before and change.
        """
        pairs = list(zip(self.tapes, all_leaves, strict=True))
        changed = {id(tensor): tensor for tape, leaves in pairs for tensor in tape.changed(leaves)}
        for tensor in changed.values():
            before_change(tensor)
        with torch.no_grad():
            copies = [(tensor, tensor.clone()) for tensor in changed.values()]
        try:
            slots = [tape.replay(leaves) for tape, leaves in pairs]
        except Differs:
            with torch.no_grad():
                for tensor, copy in copies:
                    tensor.copy_(copy)
            self._num_differing += 1
            if self._num_differing >= _MOST_DIFFERING:
                self._give_up(_DIFFERS)
            return None
        self._num_differing = 0
        return slots

    def _give_up(self, why: str) -> None:
        self.is_never_replayed = True
        self.recordings, self.tapes, self.outputs = [], [], []
        warn_once_at_user_line(why)


StaticSteps = dict[tuple[Any, ...], StaticStep]
"""Those of one step function, by kind of inputs."""
