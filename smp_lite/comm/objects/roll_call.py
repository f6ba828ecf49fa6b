"""One collective on Python objects, as a state that is polled: who has called, what, and what they said.

In a group of up to :data:`~smp_lite.comm.tree.RADIX` each member tells every other what it calls, and hears
it from each: one message each way, the fastest there is for few. Larger groups do the same by trees
(:mod:`.tree_call`). Calls over one kind of group are numbered, so that those over different groups do not mix
(:mod:`.roll_calls`).

*Something else was called.* A message says what its sender has called. Who finds that it differs raises, and
so does each. A message about another group shows the same, if its sender has not come to this call yet:
messages of one rank arrive in the order of its calls. The others of the group may not hear of that, so who
finds it out tells them.

*Somebody does not come.* Each hears from each, so each knows who is missing.

*Somebody has ended its script.* Its last words are which calls it has completed: if this was among them, all
have called, and the word is on its way; else it is missing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import SMPError, SMPMismatch, SMPTimeout
from ..collectives import Pending
from ..transports.transport import Tag

if TYPE_CHECKING:
    from .roll_calls import RollCalls

__all__ = ["Called", "Message", "Messages", "RollCall", "listed"]

_LOOK_EVERY_S = 0.05
_TAG = Tag.ROLL_CALL
ASK, HERE, ELSEWHERE, FINDING = range(4)
_ERRORS = {"timeout": SMPTimeout, "gone": SMPError, "mismatch": SMPMismatch}

Called = tuple[str, str]
"""What, and over which kind of group."""


class Messages(Protocol):
    """What a roll call needs of a :class:`~smp_lite.comm.transports.transport.Transport`."""

    rank: int

    def send(self, data: bytes, dest: int, tag: Tag) -> Pending: ...

    def receive(self, source: int, tag: Tag) -> bytes | None: ...

    def notify(self, data: bytes, dest: int) -> None: ...

    def notices(self) -> list[tuple[int, bytes]]: ...

    def departed(self) -> Mapping[int, bytes]: ...


class Message(NamedTuple):
    kind: str
    number: int
    called: str | dict[Called, int]  # in trees by whom: the lowest rank of those that it speaks for
    begun: dict[str, int]  # the sender's calls in trees so far, by kind
    said: Any  # in trees the items, by position in the group

    def first_call(self, source: int) -> tuple[int, Called]:
        if isinstance(self.called, str):
            return source, (self.called, self.kind)
        return min((rank, call) for call, rank in self.called.items())


class RollCall:
    """One call of one rank; :meth:`poll` until it is true, then :meth:`result`."""

    _unheard: list[int]  # world ranks that it hears from
    _sent: Sequence[Pending] = ()
    _is_over = False
    _look_at = 0.0

    def __init__(
        self, calls: RollCalls, payload: Any, kind: str, number: int, what: str, to_first: bool
    ) -> None:
        self._all, self._messages = calls, calls.messages
        self.kind, self.number, self.what, self._to_first = kind, number, what, to_first
        self.rank, self.group = self._messages.rank, calls.group(kind)
        self._payload = payload
        self._early = calls.early.setdefault((kind, number), {})

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
            self._start()
        elif now > self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look(now)
        if self._all.unawaited:
            self._all.drive_unawaited()  # others may still wait for them in the call that this rank gave up
        if self._sent:
            self.under_way()  # over a store a message leaves only when the one before has been taken
        early, receive = self._early, self._messages.receive
        has_heard = False
        for source in tuple(self._unheard):
            while source not in early:
                data = receive(source, _TAG)
                if data is None:
                    break
                self._all.keep(source, data)
                if len(self._all.early) > 1:
                    self._check_order()
            else:
                self._unheard.remove(source)
                self._hear(source, early[source])
                has_heard = True
        if has_heard:
            self._go_on()
        return self._is_over

    def under_way(self) -> int:
        """How many of its messages have not left; polls them."""
        self._sent = [pending for pending in self._sent if not pending.done()]
        return len(self._sent)

    def result(self) -> list[Any]:
        """Every member's payload, in group order; on others than the first None where only it is told."""
        early, me = self._early, self.rank
        return [self._payload if rank == me else early[rank].said for rank in self.group]

    def _start(self) -> None:
        self._unheard = others = [rank for rank in self.group if rank != self.rank]
        if not others:
            return self._go_on()
        send = self._messages.send
        data = for_first = self._encoded(None if self._to_first else self._payload)
        first = self.group[0]
        if self._to_first and self.rank != first:
            for_first = self._encoded(self._payload)
        self._sent = [send(for_first if rank == first else data, rank, _TAG) for rank in others]

    def _encoded(self, payload: Any) -> bytes:
        message = self.kind, self.number, self.what, self._all.begun_in_trees, payload
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def _hear(self, source: int, message: Message) -> None:
        if message.called != self.what:
            self._fail(completed=True)
            raise self._mismatch(*message.first_call(source))

    def _go_on(self) -> None:
        if not self._unheard:
            self._end(completed=True)

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
                if source in self.group and not self._has_come(source, message):
                    error = self._mismatch(*message.first_call(source))
                    # Neighbours may have heard of this rank already, and listen to it no more.
                    for rank in {*self.group} - {self.rank, source} - self._messages.departed().keys():
                        self._notify(rank, FINDING, ("mismatch", str(error)))
                    self._notify(source, FINDING, ("mismatch", str(error)), (kind, number))
                    self._fail(completed=False)
                    raise error

    def _has_come(self, source: int, message: Message) -> bool:
        """Whether a rank that is in another call has been in this one before."""
        return source in self._early

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
        found = self._not_heard_of()
        departed = self._messages.departed()
        for rank in found & departed.keys():
            words = departed[rank]
            if words and pickle.loads(words).get(self.kind, 0) >= self.number:
                found.discard(rank)
        return found

    def missing(self) -> str:
        """For errors; after :meth:`inquire`."""
        return self._explain(self.awaited(), "")

    def inquire(self, now: float, limit_s: float) -> bool:
        """Polled where the wait has ended: finds out which ranks are missing; true when they are known.

        Raises:
            SMPError: another member has found them out meanwhile, and said it.
        """
        return True

    def _not_heard_of(self) -> set[int]:
        return {rank for rank in self.group if rank != self.rank and rank not in self._early}

    def _explain(self, absent: set[int], more: str) -> str:
        text = f"{self.what} is collective over the {self.kind} group {list(self.group)}, but "
        if not absent:
            return (
                f"{text}what rank(s) {listed(self._not_heard_of())} called did not arrive at rank {self.rank}"
            )
        return f"{text}rank(s) {listed(absent)} did not call it{more}"

    def _look(self, now: float) -> None:
        """At what comes from others than those that it hears from."""
        for kind in self._all.kinds:
            if kind != self.kind:
                for source in self._all.neighbours(kind):
                    while (data := self._messages.receive(source, _TAG)) is not None:
                        self._all.keep(source, data)
        self._check_order()
        for source, data in self._messages.notices():
            word, kind, number, more = pickle.loads(data)
            is_this = (kind, number) == (self.kind, self.number)
            if word == ASK:
                mine = (self.what, self.kind)
                self._notify(source, HERE if is_this else ELSEWHERE, mine, (kind, number))
            elif word == FINDING and is_this:
                kind_of_error, text = more
                self.give_up()
                raise _ERRORS[kind_of_error](text)
            if is_this:
                self._noticed(source, word, more, now)

    def _noticed(self, source: int, word: int, more: Any, now: float) -> None:
        """A notice about this call; nobody asks where each hears from each."""

    def _notify(self, rank: int, word: int, more: Any = None, about: tuple[str, int] | None = None) -> None:
        kind, number = about or (self.kind, self.number)
        self._messages.notify(pickle.dumps((word, kind, number, more)), rank)


def listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
