"""Ranks in one process that call collectives on objects: messages in memory, a clock turned by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from smp_lite.comm.objects.roll_call import RollCall
from smp_lite.comm.objects.roll_calls import RollCalls
from smp_lite.errors import SMPError

LIMIT_S = 300.0


class Done:
    def done(self) -> bool:
        return True


class Posted:
    """It comes into the box when that is empty and somebody polls it, as in a store with a key a box."""

    def __init__(self, box: deque[bytes], data: bytes) -> None:
        self._box, self._data = box, data
        self._is_there = False
        self.done()

    def done(self) -> bool:
        if not self._is_there and not self._box:
            self._box.append(self._data)
            self._is_there = True
        return self._is_there


class Network:
    """All ranks.

    Args:
        size: how many.
        groups: world ranks of the groups of each kind; WORLD is there.
        as_a_store: a message leaves only when the one before has been taken, and its sender polls it.
    """

    def __init__(
        self,
        size: int,
        groups: Mapping[str, list[tuple[int, ...]]] | None = None,
        *,
        as_a_store: bool = False,
    ) -> None:
        self.size, self.now, self.as_a_store = size, 0.0, as_a_store
        self.is_slow = False  # nothing arrives for now
        self.boxes: dict[tuple[int, int, int], deque[bytes]] = {}
        self.notes: dict[int, deque[tuple[int, bytes]]] = {rank: deque() for rank in range(size)}
        self.sent: Counter[int] = Counter()
        self.noted: Counter[int] = Counter()
        self.bytes_from: Counter[int] = Counter()
        self.gone: dict[int, bytes] = {}
        kinds = {"WORLD": [tuple(range(size))], **(groups or {})}
        self.group_of = {
            kind: {rank: ranks for ranks in sets for rank in ranks} for kind, sets in kinds.items()
        }
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def leave(self, rank: int) -> None:
        self.gone[rank] = self.ranks[rank].calls.last_words()

    def run(self, calls: Mapping[int, RollCall], rounds: int = 60) -> dict[int, Any]:
        """What each rank gets or raises; those that are not through stay out."""
        found: dict[int, Any] = {}
        for _ in range(rounds):
            self.now += 0.01
            for rank, call in calls.items():
                if rank in found:
                    continue
                try:
                    if call.poll(self.now) and not call.under_way():
                        found[rank] = call.result()
                except SMPError as error:
                    found[rank] = error
            if len(found) == len(calls):
                break
        return found

    def end_waits(self, calls: Mapping[int, RollCall], ranks: Iterable[int]) -> dict[int, Any]:
        """The waits of these ranks have ended; what each raises, and the others that hear of it."""
        ending = set(ranks)
        found: dict[int, Any] = {}
        for _ in range(1000):
            self.now += 0.01
            for rank, call in calls.items():
                if rank in found:
                    continue
                try:
                    if rank in ending:
                        if call.inquire(self.now, LIMIT_S):
                            found[rank] = SMPError(call.missing())
                            call.give_up()
                    elif call.poll(self.now):
                        found[rank] = call.result()
                except SMPError as error:
                    found[rank] = error
            if len(found) == len(calls):
                break
        return found


class Rank:
    """One of them, as a roll call sees the transport."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self._network = rank, network
        kinds = tuple(network.group_of)
        self.calls = RollCalls(self, lambda kind: network.group_of[kind][rank], kinds)

    def begin(self, payload: Any = None, kind: str = "WORLD", what: str = "x", **more: Any) -> RollCall:
        return self.calls.begin(payload, kind, what, **more)

    def send(self, data: bytes, dest: int, tag: int) -> Done | Posted:
        box = self._network.boxes.setdefault((self.rank, dest, tag), deque())
        self._network.sent[self.rank] += 1
        self._network.bytes_from[self.rank] += len(data)
        if self._network.as_a_store:
            return Posted(box, data)
        box.append(data)
        return Done()

    def receive(self, source: int, tag: int) -> bytes | None:
        box = self._network.boxes.get((source, self.rank, tag))
        return box.popleft() if box and not self._network.is_slow else None

    def notify(self, data: bytes, dest: int) -> None:
        self._network.notes[dest].append((self.rank, data))
        self._network.noted[self.rank] += 1

    def notices(self) -> list[tuple[int, bytes]]:
        notes = self._network.notes[self.rank]
        found = list(notes)
        notes.clear()
        return found

    def departed(self) -> dict[int, bytes]:
        return self._network.gone
