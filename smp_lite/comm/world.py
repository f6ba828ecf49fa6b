"""The processes of the job and their groups.

One :class:`World` for each process: the topology, and object messages between ranks. Collectives on Python
objects are *roll calls*: each member tells every other what it is calling. So a rank that calls something
else, or does not call at all, is named in the error instead of leaving the others waiting.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Sequence
from typing import Any

from ..errors import SMPError, SMPMismatch
from ..plan.topology import Topology
from .collectives import Collectives, Pending
from .transport import Tag, Transport
from .waiting import wait_until, watch_departures
from .wires import Wire


class World:
    """The ranks of the job.

    Args:
        topology: axes over all ranks.
        transport: between them.
    """

    def __init__(self, topology: Topology, transport: Transport) -> None:
        self.topology = topology
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size
        self._groups: dict[str, tuple[int, ...]] = {}
        watch_departures(transport.departed)
        atexit.register(transport.leave)

    def close(self) -> None:
        """Forgets the other ranks, so that this process can build another world."""
        watch_departures(set)
        atexit.unregister(self.transport.leave)
        self.transport.close()

    # Groups -------------------------------------------------------------------------------------------------

    def group(self, kind: str) -> tuple[int, ...]:
        """World ranks of this rank's group of that kind, ascending.

        Args:
            kind: of the topology's, or names of axes with ``+`` between: the ranks that differ on these;
                ``""``: this rank alone.
        """
        if kind not in self._groups:
            named = "WORLD" if kind == "WORLD" else dict(self.topology.kinds).get(kind)
            self._groups[kind] = (
                self.topology.along(filter(None, kind.split("+")), self.rank)
                if named is None
                else self.topology.group(kind, self.rank)
            )
        return self._groups[kind]

    def group_rank(self, kind: str) -> int:
        return self.group(kind).index(self.rank)

    def collectives(self, kind: str) -> Collectives:
        """Over this rank's group, for one user of them; collective over the group."""
        self._meet(kind)
        return self.transport.collectives(self.group(kind))

    def wire(self, kind: str, rank_of_stage: Sequence[int]) -> Wire:
        """Between stages on this rank's group; collective over the group.

        Args:
            kind: of the group.
            rank_of_stage: for each stage the group rank that holds it.
        """
        self._meet(kind)
        return self.transport.wire(self.group(kind), rank_of_stage)

    def _meet(self, kind: str) -> None:
        """Before something blocks where a missing member is not noticed."""
        self.exchange(None, kind, "the first step")

    # Objects ------------------------------------------------------------------------------------------------

    def exchange(self, payload: Any, kind: str, what: str) -> list[Any]:
        """Collective over the group: every member's payload, in group order.

        Args:
            payload: picklable.
            what: names the call in errors; must be the same on all members.

        Raises:
            SMPTimeout: a member did not call; names the missing ranks.
            SMPMismatch: a member called something else.
        """
        group = self.group(kind)
        others = [rank for rank in group if rank != self.rank]
        data = pickle.dumps((what, kind, payload), protocol=pickle.HIGHEST_PROTOCOL)
        sends = [self.transport.send(data, rank, Tag.ROLL_CALL) for rank in others]
        found = {self.rank: payload}

        def receive() -> bool:
            _drop_done(sends)
            for rank in others:
                if rank in found:
                    continue
                message = self.transport.receive(rank, Tag.ROLL_CALL)
                if message is not None:
                    their_what, their_kind, their_payload = pickle.loads(message)
                    if (their_what, their_kind) != (what, kind):
                        raise SMPMismatch(
                            f"rank {self.rank} called {what} over {kind} group {list(group)}, "
                            f"but rank {rank} called {their_what} over its {their_kind} group"
                        )
                    found[rank] = their_payload
            return len(found) == len(group)

        def missing() -> str:
            absent = [rank for rank in group if rank not in found]
            return (
                f"{what} is collective over the {kind} group {list(group)}, "
                f"but rank(s) {', '.join(map(str, absent))} did not call it"
            )

        wait_until(receive, missing, lambda: [rank for rank in others if rank not in found])
        wait_until(
            lambda: not _drop_done(sends),
            lambda: f"{what}: {len(sends)} message(s) of rank {self.rank} to the {kind} group did not leave",
            lambda: others,
        )
        return [found[rank] for rank in group]

    def gather(self, payload: Any, kind: str, what: str) -> list[Any] | None:
        """Collective over the group: every member's payload on group rank 0, None on the others."""
        self.exchange(None, kind, what)
        group = self.group(kind)
        if self.rank != group[0]:
            self.send_object(payload, group[0], what)
            return None
        return [payload, *[self.receive_object(rank, what) for rank in group[1:]]]

    def barrier(self, kind: str = "WORLD") -> None:
        self.exchange(None, kind, "barrier")

    def send_object(self, payload: Any, dest: int, what: str = "send") -> None:
        """Blocks until the receiver has begun to receive."""
        data = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
        if dest == self.rank:
            raise SMPError(f"rank {dest} cannot send to itself")
        wait_until(
            self.transport.send(data, dest, Tag.MESSAGE, until_taken=True).done,
            lambda: f"{what} from rank {self.rank} to rank {dest} was not received",
            lambda: [dest],
        )

    def post_failure(self, number: int, text: str, ranks: Sequence[int]) -> list[Pending]:
        """Says why this rank has failed, without waiting for anybody to hear it."""
        data = pickle.dumps((number, text), protocol=pickle.HIGHEST_PROTOCOL)
        return [self.transport.send(data, rank, Tag.FAILURE) for rank in ranks]

    def receive_failure(self, source: int, number: int) -> str:
        """Why ``source`` has failed for the ``number``-th time; earlier words of it are passed over."""
        found: list[str] = []

        def receive() -> bool:
            message = self.transport.receive(source, Tag.FAILURE)
            if message is not None:
                their_number, text = pickle.loads(message)
                if their_number == number:
                    found.append(text)
            return bool(found)

        wait_until(receive, lambda: f"rank {source} has failed and does not say why", lambda: [source])
        return found[0]

    def receive_object(self, source: int, what: str = "recv_from") -> Any:
        found: list[bytes] = []

        def receive() -> bool:
            message = self.transport.receive(source, Tag.MESSAGE)
            if message is not None:
                found.append(message)
            return bool(found)

        wait_until(
            receive,
            lambda: f"{what}: rank {source} sent nothing to rank {self.rank}",
            lambda: [source],
        )
        return pickle.loads(found[0])


def _drop_done(pending: list[Pending]) -> list[Pending]:
    """Polls each, and leaves those in the list that are not done."""
    pending[:] = [each for each in pending if not each.done()]
    return pending
