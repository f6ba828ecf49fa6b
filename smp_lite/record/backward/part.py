"""A part of a microbatch's backward: that of one segment, and what lies in other ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..commands.recording import Command

__all__ = ["Owners", "Part"]

Owners = frozenset[int | str]
"""Ids of modules that are called whole, and names of parameters that containers use."""


class Part(NamedTuple):
    """What runs now.

    Attributes:
        microbatch_index: whose backward.
        stage_index: where.
        here: the owners of its calls.
        elsewhere: those of the microbatch's other calls on this stage, whose backwards run at other times.
    """

    microbatch_index: int
    stage_index: int
    here: Owners
    elsewhere: Owners

    @classmethod
    def of(
        cls, microbatch_index: int, stage_index: int, all_commands: Sequence[Command], commands: Iterable[int]
    ) -> Part:
        """The part with these of a microbatch's commands, by index."""
        own = frozenset(commands)
        here, elsewhere = set(), set()
        for command in all_commands:
            if command.stage_index == stage_index:
                owner = command.parameter or id(command.module)
                (here if command.index in own else elsewhere).add(owner)
        empty = id(None)  # functions
        return cls(microbatch_index, stage_index, frozenset(here - {empty}), frozenset(elsewhere - {empty}))

    def has_all_of(self, owners: Owners) -> bool:
        """Whether nothing of it lies in another visit of the stage."""
        return not self.elsewhere or (bool(owners & self.here) and not owners & self.elsewhere)
