"""The ranks of an MPI job: messages, groups and wires over ``MPI.COMM_WORLD``.

MPI itself says who the ranks are; what its launcher said is only compared. Importing this module
initialises MPI.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mpi4py

mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI  # noqa: E402  (initialises MPI with the level above)

from ...errors import SMPError  # noqa: E402
from ..collectives import MPICollectives, Pending  # noqa: E402
from ..tree import nearby  # noqa: E402
from ..waiting import watchdog_s  # noqa: E402
from .launcher import Alone, UnderMPI  # noqa: E402
from .start_watch import watch_end  # noqa: E402
from .transport import Host, Tag  # noqa: E402

__all__ = ["MPITransport"]

_RANK = struct.Struct("<I")
_MEETING_SLEEP_S = 0.001


class MPITransport:
    """The processes of ``MPI.COMM_WORLD``.

    Args:
        launch: what the launcher said.

    Raises:
        SMPError: MPI counts other ranks than the launcher.
    """

    has_mpi = True

    def __init__(self, launch: UnderMPI | Alone) -> None:
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if isinstance(launch, UnderMPI) and launch.size not in (None, self.size):
            raise SMPError(
                f"the launcher that set {launch.variable} started {launch.size} process(es), but MPI counts "
                f"{self.size}: mpirun and mpi4py belong to different MPI installations. Use the mpirun of "
                f"what mpi4py has loaded: {MPI.Get_library_version().splitlines()[0]}"
            )
        # A communicator of our own: no message of the user's or of another library is mistaken for ours.
        self._comm = MPI.COMM_WORLD.Dup()
        host = _same_host(self._comm)
        self.local_rank, self.local_size = host.Get_rank(), host.Get_size()
        self._status = MPI.Status()  # of the last message
        self._departed: dict[int, bytes] = {}
        self._notes: list[_Sent] = []
        self._passes_on_to = nearby(self.size, self.rank)
        _let_children_end()

    # Messages -----------------------------------------------------------------------------------------------

    def send(self, data: bytes, dest: int, tag: Tag, *, until_taken: bool = False) -> Pending:
        start = self._comm.Issend if until_taken else self._comm.Isend
        return _Sent(start([data, MPI.BYTE], dest=dest, tag=tag), data)

    def receive(self, source: int, tag: Tag) -> bytes | None:
        message = self._comm.Improbe(source, tag, self._status)
        if message is None:
            return None
        buffer = bytearray(self._status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        return bytes(buffer)

    def notify(self, data: bytes, dest: int) -> None:
        self._note(data, [dest], Tag.NOTICE)

    def notices(self) -> list[tuple[int, bytes]]:
        return list(iter(lambda: self._receive_any(Tag.NOTICE), None))

    def _receive_any(self, tag: Tag) -> tuple[int, bytes] | None:
        """The next message, and from which rank."""
        data = self.receive(MPI.ANY_SOURCE, tag)
        return None if data is None else (self._status.Get_source(), data)

    def _note(self, data: bytes, dests: Iterable[int], tag: Tag) -> None:
        self._notes = [note for note in self._notes if not note.done()]
        self._notes += [self.send(data, dest, tag) for dest in dests]

    # Leaving ------------------------------------------------------------------------------------------------

    def departed(self) -> Mapping[int, bytes]:
        while (found := self._receive_any(Tag.GOODBYE)) is not None:
            source, data = found
            rank, words = _RANK.unpack_from(data)[0], data[_RANK.size :]
            if rank not in self._departed:
                self._departed[rank] = words
                self._note(data, {*self._passes_on_to} - self._departed.keys() - {source}, Tag.GOODBYE)
        return self._departed

    def leave(self, last_words: bytes, told: Sequence[int]) -> None:
        if MPI.Is_finalized():
            return
        self._note(_RANK.pack(self.rank) + last_words, {*self._passes_on_to, *told}, Tag.GOODBYE)
        if self.size > 1:
            watch_end(self.rank, watchdog_s())

    def meet_at_end(self, limit_s: float) -> None:
        if MPI.Is_finalized():
            return
        request, end = self._comm.Ibarrier(), time.monotonic() + limit_s
        while not request.Test() and time.monotonic() < end:
            time.sleep(_MEETING_SLEEP_S)

    def abort(self, exit_code: int) -> None:
        MPI.COMM_WORLD.Abort(exit_code)

    def close(self) -> None:
        """Nothing: freeing a communicator would be collective."""

    # Groups -------------------------------------------------------------------------------------------------

    def collectives(self, ranks: Sequence[int]) -> MPICollectives:
        return MPICollectives(self.new_group(ranks))

    def new_group(self, ranks: Sequence[int]) -> MPI.Comm:
        return self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))


class _Sent:
    """A send under way, with the data that must stay until it is done."""

    def __init__(self, request: Any, data: bytes) -> None:
        self._request, self._data = request, data

    def done(self) -> bool:
        return bool(self._request.Test())


_FINALIZE_COMPLETED = 5
"""Open MPI's state of a process that has ended MPI, in all of its versions 4 and 5."""

_children_can_end = False


def _let_children_end() -> None:
    """Lets processes that the script forks end as Python does, without MPI.

    mpi4py would end MPI in them too, which waits for the other ranks for ever, in memory that the child
    shares with the rank. In a child MPI counts as ended from the start: what would still use it is an error.
    """
    global _children_can_end
    if _children_can_end:
        return
    _children_can_end = True
    try:
        state = ctypes.c_int32.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state")
    except (OSError, ValueError):  # another MPI, which has a place of its own for that
        return

    def end_mpi() -> None:
        state.value = _FINALIZE_COMPLETED

    os.register_at_fork(after_in_child=end_mpi)


def _same_host(comm: MPI.Comm) -> MPI.Comm:
    """The ranks on this host; where a machine plays several, on this one of them."""
    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    played = machine.allgather(Host.here().played)
    here = machine.Get_rank()
    return machine.Split(color=sorted(set(played)).index(played[here]), key=here)
