"""One collective on Python objects, as a state that is polled: who has called, what, and what they said.

Word goes up trees, across their tops, and down again (:mod:`smp_lite.comm.tree`). What a member says travels
only where it is wanted: to all, or to the first member; who says None sends nothing. Calls over one kind of
group are numbered, so that those over different groups do not mix.

*Something else was called.* Each message says what its sender, and all that it speaks for, have called. Who
finds two different calls tells its neighbours at once and raises, and so do they. A message about another
group whose sender has not come to this call yet shows the same.

*Somebody does not come.* In a small group each member hears from each, and knows who is missing. In a larger
one it knows its neighbours only. So when its wait ends, by the limit or because a member has ended its
script, it asks all; those that wait in the same call answer, and get the finding, so that they need not ask
as well. The top ones ask first. This costs three messages for each member; it is the end of the job in most
cases.

*Somebody has ended its script.* Its last words are which calls it has completed: if this was among them, all
have called, and the word is on its way; else it is missing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import SMPError, SMPMismatch, SMPTimeout
from .collectives import Pending
from .transport import Tag
from .tree import RADIX, Place, place, subtree

__all__ = ["Messages", "RollCall", "RollCalls"]

_LOOK_EVERY_S = 0.05
_TURN_S = 0.1
_ANSWER_S = 1.0
_FINDING_S = 3.0
_ASK, _HERE, _ELSEWHERE, _FINDING = range(4)
_ERRORS = {"timeout": SMPTimeout, "gone": SMPError, "mismatch": SMPMismatch}

Called = tuple[str, str]
"""What, and over which kind of group."""


class Messages(Protocol):
    """What a roll call needs of a :class:`~smp_lite.comm.transport.Transport`."""

    rank: int

    def send(self, data: bytes, dest: int, tag: Tag) -> Pending: ...

    def receive(self, source: int, tag: Tag) -> bytes | None: ...

    def notify(self, data: bytes, dest: int) -> None: ...

    def notices(self) -> list[tuple[int, bytes]]: ...

    def departed(self) -> Mapping[int, bytes]: ...


class _Head(NamedTuple):
    kind: str
    number: int
    calls: dict[Called, int]  # the lowest rank that called it
    begun: dict[str, int]  # the sender's calls so far, by kind
    lengths: dict[int, int]  # of the items, by position in the group


class _Message(NamedTuple):
    head: _Head
    items: dict[int, memoryview]


def _encode(head: _Head, items: Mapping[int, Any]) -> bytes:
    start = pickle.dumps(tuple(head), protocol=pickle.HIGHEST_PROTOCOL)
    return b"".join([start, *items.values()]) if items else start


def _decode(data: bytes) -> _Message:
    head = _Head._make(pickle.loads(data))  # what follows it is passed over
    items: dict[int, memoryview] = {}
    if head.lengths:
        view, start = memoryview(data), len(data) - sum(head.lengths.values())
        for position, size in head.lengths.items():
            items[position] = view[start : start + size]
            start += size
    return _Message(head, items)


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
        self.completed: dict[str, int] = {}
        self.early: dict[tuple[str, int], dict[int, _Message]] = {}
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
        self.unawaited = [pending for pending in self.unawaited if not pending.done()]
        return RollCall(self, payload, kind, number, what, to_first)

    def over(self, kind: str, number: int, *, completed: bool) -> None:
        if completed:
            self.completed[kind] = number
        self.early.pop((kind, number), None)

    def receive(self, source: int) -> _Message | None:
        """The next message of that rank, kept for the call that it belongs to."""
        data = self.messages.receive(source, Tag.ROLL_CALL)
        if data is None:
            return None
        message = _decode(data)
        kind, number = message.head[:2]
        if number > self.completed.get(kind, 0):
            self.early.setdefault((kind, number), {})[source] = message
        return message


class RollCall:
    """One call of one rank; :meth:`poll` until it is true, then :meth:`result`."""

    def __init__(
        self, calls: RollCalls, payload: Any, kind: str, number: int, what: str, to_first: bool
    ) -> None:
        self._all, self._messages = calls, calls.messages
        self.kind, self.number, self.what, self._to_first = kind, number, what, to_first
        self.rank, self.group = calls.messages.rank, calls.group(kind)
        self._index = self.group.index(self.rank)
        self._place, self._radix = calls.place(kind), calls.radix
        self._payload = payload
        self._items: dict[int, Any] = {}
        if payload is not None and len(self.group) > 1 and not (to_first and self._index == 0):
            self._items[self._index] = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
        self._called: dict[Called, int] = {(what, kind): self.rank}
        self._unheard = [*self._place.fellows, *self._place.children]
        if self._place.parent is not None:
            self._unheard.append(self._place.parent)
        self._heard: set[int] = set()  # positions of neighbours
        self._early = calls.early.setdefault((kind, number), {})
        self._told: set[int] = set()
        self._sent: list[Pending] = []
        self._is_over = False
        self._look_at = 0.0
        self._answers: dict[int, Called | None] = {}  # None: in this call too
        self._turn: float | None = None
        self._asked: float | None = None

    # Where all is well --------------------------------------------------------------------------------------

    def poll(self, now: float) -> bool:
        """Drives it; true when all have called.

        Raises:
            SMPMismatch: a member called something else.
            SMPTimeout: another member has given up waiting, and said for whom.
            SMPError: the same, for a member that has ended its script.
        """
        if self._is_over:
            return True
        if not self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._check_order()
            self._advance()
        elif now > self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look(now)
        if self._sent:
            self.under_way()  # over a store a message leaves only when the one before has been taken
        has_heard = False
        for position in tuple(self._unheard):
            source = self.group[position]
            while source not in self._early and self._all.receive(source) is not None:
                self._check_order()
            if source in self._early:
                self._hear(position, self._early[source])
                has_heard = True
        if has_heard:
            self._advance()
        return self._is_over

    def under_way(self) -> int:
        """How many of its messages have not left; polls them."""
        self._sent = [pending for pending in self._sent if not pending.done()]
        return len(self._sent)

    def result(self) -> list[Any]:
        """Every member's payload, in group order; on others than the first None where only it is told."""
        found: list[Any] = [None] * len(self.group)
        self._items.pop(self._index, None)
        for position, item in self._items.items():
            found[position] = pickle.loads(item)
        found[self._index] = self._payload
        return found

    def _hear(self, position: int, message: _Message) -> None:
        self._heard.add(position)
        self._unheard.remove(position)
        for call, rank in message.head.calls.items():
            self._called[call] = min(rank, self._called.get(call, rank))
        if len(self._called) > 1:
            self._differ()
        if position == self._place.parent:
            self._items = {}
        self._items.update(message.items)

    def _advance(self) -> None:
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
        data = _encode(_Head(self.kind, self.number, self._called, self._all.begun, lengths), items)
        self._sent += [
            self._messages.send(data, self.group[position], Tag.ROLL_CALL) for position in positions
        ]

    def _end(self, *, completed: bool) -> None:
        self._is_over = True
        self._all.over(self.kind, self.number, completed=completed)

    def _fail(self, *, completed: bool) -> None:
        """Its messages need not arrive any more, but nothing may happen to them while they are under way."""
        self._end(completed=completed)
        self._all.unawaited += self._sent

    # Something else was called ------------------------------------------------------------------------------

    def _check_order(self) -> None:
        """Of messages that belong to other calls: whether their senders will come to this one first."""
        if len(self._all.early) == 1:  # this call's own
            return
        for (kind, number), messages in self._all.early.items():
            if kind == self.kind or number <= self._all.begun.get(kind, 0):
                continue
            for source, message in messages.items():
                if source in self.group and message.head.begun.get(self.kind, 0) < self.number:
                    error = self._mismatch(*min((rank, call) for call, rank in message.head.calls.items()))
                    # Neighbours may have heard of this rank already, and listen to it no more.
                    for rank in {*self.group} - {self.rank, source} - self._messages.departed().keys():
                        self._notify(rank, _FINDING, ("mismatch", str(error)))
                    self._notify(source, _FINDING, ("mismatch", str(error)), (kind, number))
                    self._fail(completed=False)
                    raise error

    def _differ(self) -> None:
        parent, fellows, children = self._place
        above = fellows if parent is None else () if parent in self._heard else (parent,)
        self._tell([*above, *children], {})
        self._fail(completed=True)
        mine = (self.what, self.kind)
        raise self._mismatch(*min((rank, call) for call, rank in self._called.items() if call != mine))

    def _mismatch(self, rank: int, call: Called) -> SMPMismatch:
        return SMPMismatch(
            f"rank {self.rank} called {self.what} over {self.kind} group {list(self.group)}, "
            f"but rank {rank} called {call[0]} over its {call[1]} group"
        )

    # Somebody does not come ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """This rank waits no longer; the next call over the group has the same number."""
        if not self._is_over:
            self._fail(completed=False)

    def awaited(self) -> set[int]:
        """World ranks that may not have called."""
        here = {self._index}
        for position in self._heard:
            here.update(subtree(len(self.group), position, self._radix))
        found = {rank for i, rank in enumerate(self.group) if i not in here}
        departed = self._messages.departed()
        for rank in found & departed.keys():
            words = departed[rank]
            if words and pickle.loads(words).get(self.kind, 0) >= self.number:
                found.discard(rank)
        return found

    def missing(self) -> str:
        """For errors; after :meth:`inquire`."""
        awaited = self.awaited()
        absent = awaited - {rank for rank, call in self._answers.items() if call is None}
        text = f"{self.what} is collective over the {self.kind} group {list(self.group)}, but "
        if not absent:
            return f"{text}what rank(s) {_listed(awaited)} called did not arrive at rank {self.rank}"
        text += f"rank(s) {_listed(absent)} did not call it"
        elsewhere = [
            f"; rank {rank} is in {call[0]} over its {call[1]} group"
            for rank, call in sorted(self._answers.items())
            if call is not None
        ]
        return text + "".join(elsewhere)

    def inquire(self, now: float, limit_s: float) -> bool:
        """Polled where the wait has ended: finds out which ranks are missing; true when they are known.

        Raises:
            SMPError: another member has found them out meanwhile, and said it.
        """
        if len(self.group) <= self._radix:
            return True
        self._look(now)
        if self._asked is None:
            if self._turn is None:
                self._turn = now + _TURN_S * min(self._index, 2 * self._radix)
            if now < self._turn:
                return False
            self._asked = now
            # Those that it has heard of as well: they hear that it asks, and wait for what it finds.
            for rank in {*self.group} - self._messages.departed().keys() - {self.rank}:
                self._notify(rank, _ASK)
        silent = self.awaited() - self._messages.departed().keys() - self._answers.keys()
        if silent and now < self._asked + _ANSWER_S:
            return False
        departed = self._messages.departed().keys()
        gone = self.awaited() & departed
        early = f"rank(s) {_listed(gone)} ended the script early" if gone else ""
        text = f"{early or f'rank {self.rank} waited {limit_s:g} s'}: {self.missing()}"
        here = {rank for rank, call in self._answers.items() if call is None}
        for rank in ({*self.group} - self.awaited() | here) - departed - {self.rank}:
            self._notify(rank, _FINDING, ("gone" if gone else "timeout", text))
        return True

    def _look(self, now: float) -> None:
        """At what comes from others than neighbours."""
        for kind in self._all.kinds:
            if kind != self.kind:
                for source in self._all.neighbours(kind):
                    while self._all.receive(source) is not None:
                        pass
        self._check_order()
        for source, data in self._messages.notices():
            word, kind, number, more = pickle.loads(data)
            is_this = (kind, number) == (self.kind, self.number)
            if word == _ASK:
                mine = (self.what, self.kind)
                self._notify(source, _HERE if is_this else _ELSEWHERE, mine, (kind, number))
                if is_this and self._asked is None:
                    self._turn = now + _FINDING_S
            elif word in (_HERE, _ELSEWHERE) and is_this:
                self._answers[source] = more if word == _ELSEWHERE else None
            elif word == _FINDING and is_this:
                kind_of_error, text = more
                self.give_up()
                raise _ERRORS[kind_of_error](text)

    def _notify(self, rank: int, word: int, more: Any = None, about: tuple[str, int] | None = None) -> None:
        kind, number = about or (self.kind, self.number)
        self._messages.notify(pickle.dumps((word, kind, number, more)), rank)


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
