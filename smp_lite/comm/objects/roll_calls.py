"""All collectives on Python objects of one rank: their numbers, and messages that came before their call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from ..collectives import Pending
from ..tree import RADIX, Place, place
from .roll_call import Message, Messages, RollCall
from .tree_call import TreeCall, items_of

__all__ = ["RollCalls"]


class RollCalls:
    """All roll calls of one rank.

    Args:
        messages: between ranks.
        group: world ranks of this rank's group of a kind.
        kinds: of groups over which others may call while this rank is in another call.
    """

    def __init__(
        self, messages: Messages, group: Callable[[str], tuple[int, ...]], kinds: tuple[str, ...] = ()
    ) -> None:
        self.messages, self.group = messages, group
        self.kinds = dict.fromkeys(kinds)
        self.begun: dict[str, int] = {}
        self.begun_in_trees: dict[str, int] = {}
        self.completed: dict[str, int] = {}
        self.early: dict[tuple[str, int], dict[int, Message]] = {}
        self.radix = RADIX
        self._places: dict[tuple[str, int], Place] = {}
        self.unawaited: list[Pending] = []

    def neighbours(self, kind: str) -> list[int]:
        """World ranks that this one hears from in calls over its group of that kind."""
        group = self.group(kind)
        return [group[i] for i in self.place(kind).neighbours]

    def place(self, kind: str) -> Place:
        key = kind, self.radix
        if key not in self._places:
            group = self.group(kind)
            self._places[key] = place(len(group), group.index(self.messages.rank), self.radix)
        return self._places[key]

    def last_words(self) -> bytes:
        """For those that wait for this rank when its script has ended."""
        return pickle.dumps(self.completed)

    def begin(self, payload: Any, kind: str, what: str, *, to_first: bool = False) -> RollCall:
        self.kinds.setdefault(kind)
        number = self.completed.get(kind, 0) + 1  # one that failed is called again
        self.begun[kind] = number
        if self.unawaited:
            self.drive_unawaited()
        if len(self.group(kind)) <= self.radix:
            return RollCall(self, payload, kind, number, what, to_first)
        self.begun_in_trees[kind] = number
        return TreeCall(self, payload, kind, number, what, to_first)

    def drive_unawaited(self) -> None:
        self.unawaited = [pending for pending in self.unawaited if not pending.done()]

    def over(self, kind: str, number: int, *, completed: bool) -> None:
        if completed:
            self.completed[kind] = number
        self.early.pop((kind, number), None)

    def keep(self, source: int, data: bytes) -> None:
        """A message, for the call that it belongs to."""
        message = Message._make(pickle.loads(data))  # what follows it is passed over
        kind, number, called, _, said = message
        if number > self.completed.get(kind, 0):
            if not isinstance(called, str):
                message = message._replace(said=items_of(data, said))
            self.early.setdefault((kind, number), {})[source] = message
