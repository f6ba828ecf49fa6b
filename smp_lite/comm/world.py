"""The processes of the job and their groups, over MPI.

One :class:`World` for each process: the topology, a communicator for each group kind, and object messages
between ranks. Collectives on Python objects are *roll calls*: each member tells every other what it is
calling. So a rank that calls something else, or does not call at all, is named in the error instead of
leaving the others waiting.
"""

from __future__ import annotations

import atexit
import pickle
import socket
from typing import Any

import mpi4py

mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI  # noqa: E402  (initialises MPI with the level above)

from ..errors import SMPError, SMPMismatch  # noqa: E402
from ..plan.topology import Topology  # noqa: E402
from .waiting import wait_until, watch_departures  # noqa: E402

GROUP_KINDS = ("WORLD", "MP", "DP", "PP", "TP", "RDP")

_ROLL_CALL_TAG = 1
_MESSAGE_TAG = 2
_GOODBYE_TAG = 3


class World:
    """The ranks of the job.

    Args:
        topology: axes over all ranks of ``MPI.COMM_WORLD``.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # A communicator of our own: no message of the user's or of another library is mistaken for ours.
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        self._local = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = self._local.Get_rank()
        self.local_size = self._local.Get_size()
        self._groups = {kind: topology.group(kind, self.rank) for kind in GROUP_KINDS}
        # All made here: making one blocks inside MPI, where a peer that went elsewhere is never noticed.
        self._comms = {kind: self._make_comm(kind) for kind in GROUP_KINDS}
        self._departed: set[int] = set()
        watch_departures(self.departed)
        atexit.register(self._say_goodbye)

    def group(self, kind: str) -> tuple[int, ...]:
        """World ranks of this rank's group of that kind, ascending."""
        return self._groups[kind]

    def group_rank(self, kind: str) -> int:
        return self._groups[kind].index(self.rank)

    def _make_comm(self, kind: str) -> MPI.Comm:
        members = self.comm.Get_group().Incl(list(self._groups[kind]))
        return self.comm.Create_group(members, tag=GROUP_KINDS.index(kind))

    def new_comm(self, kind: str, what: str) -> MPI.Comm:
        """Another communicator over this rank's group, for one user of it; collective over the group.

        Making one blocks inside MPI, so the members meet first, where a missing one is noticed.
        """
        self.exchange(None, kind, what)
        return self._comms[kind].Dup()

    # Leaving ----------------------------------------------------------------------------------------------

    def departed(self) -> set[int]:
        """World ranks whose scripts have ended."""
        status = MPI.Status()
        while self.comm.Iprobe(source=MPI.ANY_SOURCE, tag=_GOODBYE_TAG, status=status):
            self.comm.Recv([bytearray(0), MPI.BYTE], source=status.Get_source(), tag=_GOODBYE_TAG)
            self._departed.add(status.Get_source())
        return self._departed

    def _say_goodbye(self) -> None:
        """Tells all others, when this process's script has ended, not to wait for it any more."""
        if MPI.Is_finalized():
            return
        for rank in range(self.size):
            if rank != self.rank:
                self.comm.Isend([b"", MPI.BYTE], dest=rank, tag=_GOODBYE_TAG).Free()

    # Objects ----------------------------------------------------------------------------------------------

    def exchange(self, payload: Any, kind: str, what: str) -> list[Any]:
        """Collective over the group: every member's payload, in group order.

        Args:
            payload: picklable.
            what: names the call in errors; must be the same on all members.

        Raises:
            SMPTimeout: a member did not call; names the missing ranks.
            SMPMismatch: a member called something else.
        """
        group = self._groups[kind]
        others = [rank for rank in group if rank != self.rank]
        data = pickle.dumps((what, kind, payload), protocol=pickle.HIGHEST_PROTOCOL)
        sends = [self.comm.Isend([data, MPI.BYTE], dest=rank, tag=_ROLL_CALL_TAG) for rank in others]
        found = {self.rank: payload}

        def receive() -> bool:
            for rank in others:
                if rank not in found and (message := self._probe(rank, _ROLL_CALL_TAG)) is not None:
                    their_what, their_kind, their_payload = message.payload
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
        self.complete(sends, what)
        return [found[rank] for rank in group]

    def gather(self, payload: Any, kind: str, what: str) -> list[Any] | None:
        """Collective over the group: every member's payload on group rank 0, None on the others."""
        self.exchange(None, kind, what)
        group = self._groups[kind]
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
        request = self.comm.Issend([data, MPI.BYTE], dest=dest, tag=_MESSAGE_TAG)
        wait_until(
            request.Test,
            lambda: f"{what} from rank {self.rank} to rank {dest} was not received",
            lambda: [dest],
        )

    def receive_object(self, source: int, what: str = "recv_from") -> Any:
        found: list[Any] = []

        def receive() -> bool:
            message = self._probe(source, _MESSAGE_TAG)
            if message is not None:
                found.append(message)
            return bool(found)

        wait_until(
            receive,
            lambda: f"{what}: rank {source} sent nothing to rank {self.rank}",
            lambda: [source],
        )
        return found[0].payload

    def _probe(self, source: int, tag: int) -> _Received | None:
        message = self.comm.Improbe(source=source, tag=tag, status=(status := MPI.Status()))
        if message is None:
            return None
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        return _Received(pickle.loads(buffer))

    # Requests -----------------------------------------------------------------------------------------------

    def complete(self, requests: list[MPI.Request], what: str) -> None:
        """Waits for requests, within the limit."""
        left = list(requests)

        def test() -> bool:
            left[:] = [request for request in left if not request.Test()]
            return not left

        wait_until(test, lambda: f"{what}: {len(left)} transfer(s) of rank {self.rank} did not end")

    def host_name(self) -> str:
        return socket.gethostname()


class _Received:
    """A received object; a received None is not "nothing received"."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload


def world_size() -> int:
    return int(MPI.COMM_WORLD.Get_size())


def world_rank() -> int:
    return int(MPI.COMM_WORLD.Get_rank())


def abort(exit_code: int) -> None:
    """Ends all processes of the job."""
    MPI.COMM_WORLD.Abort(exit_code)
