"""A roll call of many: word goes up trees, across their tops, and down again (:mod:`smp_lite.comm.tree`).

What a member says travels only where it is wanted: to all, or to the first member; who says None sends
nothing. On the way it is bytes: only who asked for it unpickles it.

*Something else was called.* Each message says what its sender, and all that it speaks for, have called. Who
finds two different calls tells its neighbours at once and raises, and so do they. What a neighbour in another
call has begun before, its message says.

*Somebody does not come.* A member hears from its neighbours only. So when its wait ends, by the limit or
because a member has ended its script, it asks all; those that wait in the same call answer, and get the
finding, so that they need not ask as well. The top ones ask first. This costs three messages for each member;
it is the end of the job in most cases.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..transports.transport import Tag
from ..tree import subtree
from .roll_call import ASK, ELSEWHERE, FINDING, HERE, Called, Message, RollCall, listed

if TYPE_CHECKING:
    from .roll_calls import RollCalls

__all__ = ["TreeCall", "items_of"]

_TURN_S = 0.1
_ANSWER_S = 1.0
_FINDING_S = 3.0


def items_of(data: bytes, lengths: Mapping[int, int]) -> dict[int, memoryview]:
    """What a message carries behind its head, by position in the group."""
    items: dict[int, memoryview] = {}
    view, start = memoryview(data), len(data) - sum(lengths.values())
    for position, size in lengths.items():
        items[position] = view[start : start + size]
        start += size
    return items


class TreeCall(RollCall):
    """One call of one rank, over a group of more than the trees' radix."""

    def __init__(
        self, calls: RollCalls, payload: Any, kind: str, number: int, what: str, to_first: bool
    ) -> None:
        super().__init__(calls, payload, kind, number, what, to_first)
        self._index = bisect_left(self.group, self.rank)
        self._place, self._radix = calls.place(kind), calls.radix
        self._items: dict[int, Any] = {}
        if payload is not None and not (to_first and self._index == 0):
            self._items[self._index] = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
        self._called: dict[Called, int] = {(what, kind): self.rank}
        self._heard: set[int] = set()  # positions of neighbours
        self._told: set[int] = set()
        self._answers: dict[int, Called | None] = {}  # None: in this call too
        self._turn: float | None = None
        self._asked: float | None = None

    def result(self) -> list[Any]:
        found: list[Any] = [None] * len(self.group)
        self._items.pop(self._index, None)
        for position, item in self._items.items():
            found[position] = pickle.loads(item)
        found[self._index] = self._payload
        return found

    def _start(self) -> None:
        self._unheard = [self.group[position] for position in self._place.neighbours]
        self._go_on()

    def _hear(self, source: int, message: Message) -> None:
        position = bisect_left(self.group, source)
        self._heard.add(position)
        assert isinstance(message.called, dict)
        for call, rank in message.called.items():
            self._called[call] = min(rank, self._called.get(call, rank))
        if len(self._called) > 1:
            self._differ()
        if position == self._place.parent:
            self._items = {}
        self._items.update(message.said)

    def _go_on(self) -> None:
        parent, fellows, children = self._place
        if not self._heard.issuperset(children):
            return
        if parent is not None:
            self._tell([parent], self._items)
        elif fellows and fellows[0] not in self._told:
            own = self._items
            if children or self._heard:
                # What fellows said may have come already, and is not for the others.
                below_here = subtree(len(self.group), self._index, self._radix)
                own = {i: self._items[i] for i in below_here if i in self._items}
            if self._to_first:
                self._tell(fellows[:1] if self._index else (), own)
                own = {}
            self._tell(fellows, own)
        if not self._unheard:
            self._tell(children, {} if self._to_first else self._items)
            self._end(completed=True)

    def _tell(self, positions: Sequence[int], items: Mapping[int, Any]) -> None:
        """Once each."""
        positions = [position for position in positions if position not in self._told]
        if not positions:
            return
        self._told.update(positions)
        lengths = {i: len(item) for i, item in items.items()}
        head = self.kind, self.number, self._called, self._all.begun_in_trees, lengths
        data = b"".join([pickle.dumps(head, protocol=pickle.HIGHEST_PROTOCOL), *items.values()])
        send = self._messages.send
        self._sent = [*self._sent, *[send(data, self.group[i], Tag.ROLL_CALL) for i in positions]]

    # Something else was called ------------------------------------------------------------------------------

    def _has_come(self, source: int, message: Message) -> bool:
        return message.begun.get(self.kind, 0) >= self.number

    def _differ(self) -> None:
        parent, fellows, children = self._place
        above = fellows if parent is None else () if parent in self._heard else (parent,)
        self._tell([*above, *children], {})
        self._fail(completed=True)
        mine = (self.what, self.kind)
        raise self._mismatch(*min((rank, call) for call, rank in self._called.items() if call != mine))

    # Somebody does not come ---------------------------------------------------------------------------------

    def missing(self) -> str:
        elsewhere = [
            f"; rank {rank} is in {call[0]} over its {call[1]} group"
            for rank, call in sorted(self._answers.items())
            if call is not None
        ]
        return self._explain(self.awaited() - self._also_here(), "".join(elsewhere))

    def inquire(self, now: float, limit_s: float) -> bool:
        self._look(now)
        if self._asked is None:
            if self._turn is None:
                self._turn = now + _TURN_S * min(self._index, 2 * self._radix)
            if now < self._turn:
                return False
            self._asked = now
            # Those that it has heard of as well: they hear that it asks, and wait for what it finds.
            for rank in {*self.group} - self._messages.departed().keys() - {self.rank}:
                self._notify(rank, ASK)
        silent = self.awaited() - self._messages.departed().keys() - self._answers.keys()
        if silent and now < self._asked + _ANSWER_S:
            return False
        departed = self._messages.departed().keys()
        gone = self.awaited() & departed
        early = f"rank(s) {listed(gone)} ended the script early" if gone else ""
        text = f"{early or f'rank {self.rank} waited {limit_s:g} s'}: {self.missing()}"
        for rank in ({*self.group} - self.awaited() | self._also_here()) - departed - {self.rank}:
            self._notify(rank, FINDING, ("gone" if gone else "timeout", text))
        return True

    def _not_heard_of(self) -> set[int]:
        here = {self._index}
        for position in self._heard:
            here.update(subtree(len(self.group), position, self._radix))
        return {rank for i, rank in enumerate(self.group) if i not in here}

    def _also_here(self) -> set[int]:
        """Those that have answered that they wait in this call too."""
        return {rank for rank, call in self._answers.items() if call is None}

    def _noticed(self, source: int, word: int, more: Any, now: float) -> None:
        if word == ASK and self._asked is None:
            self._turn = now + _FINDING_S
        elif word in (HERE, ELSEWHERE):
            self._answers[source] = more if word == ELSEWHERE else None
