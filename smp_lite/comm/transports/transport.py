"""What the library needs of the processes of a job, whoever started them.

A :class:`Transport` carries byte messages between ranks, and makes collectives and groups of
them. Two makes: :class:`~smp_lite.comm.transports.mpi.MPITransport`, and
:class:`~smp_lite.comm.transports.store.StoreTransport`, which needs no MPI.

Sending and receiving are polled, so that a wait has a limit and can say for whom it waited
(:mod:`smp_lite.comm.waiting`). What blocks, making a group, is called when all its members are known to be
there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from ..collectives import Collectives, Pending

__all__ = ["Host", "Tag", "Transport"]


class Tag(IntEnum):
    """Messages of one tag, from one rank to another, arrive in the order of sending."""

    ROLL_CALL = 1
    MESSAGE = 2
    GOODBYE = 3
    FAILURE = 4
    STAGE_FAILURE = 5
    NOTICE = 6


class Host(NamedTuple):
    """Where a rank runs. One machine may play several hosts of a job, which differ by ``played`` only."""

    machine: str
    played: str

    @classmethod
    def here(cls) -> Host:
        """This process's own."""
        return cls(socket.gethostname(), os.environ.get("SM_CURRENT_HOST", ""))


class Transport(Protocol):
    """The processes of the job, as one of them sees them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    has_mpi: bool

    def send(self, data: bytes, dest: int, tag: Tag, *, until_taken: bool = False) -> Pending:
        """Starts sending; one message to a rank and tag must be done before the next is started.

        Args:
            data: what to send.
            dest: world rank, not this one.
            tag: of the message.
            until_taken: it is done when the receiver has begun to receive, not when it is on its way.
        """

    def receive(self, source: int, tag: Tag) -> bytes | None:
        """The next message of that rank; None: none has arrived yet."""

    def notify(self, data: bytes, dest: int) -> None:
        """Sends some bytes that nobody needs to wait for."""

    def notices(self) -> list[tuple[int, bytes]]:
        """What others have sent by :meth:`notify`, and from which rank."""

    def departed(self) -> Mapping[int, bytes]:
        """World ranks whose scripts have ended, as far as this one has heard, and their last words."""

    def leave(self, last_words: bytes, told: Sequence[int]) -> None:
        """Tells the others, when this process's script has ended, not to wait for it any more.

        Args:
            last_words: for those who wait.
            told: ranks that must hear of it at once; all others do from those that wait themselves.
        """

    def meet_at_end(self, limit_s: float) -> None:
        """After :meth:`leave`: returns when every rank's script has ended, or at that limit."""

    def abort(self, exit_code: int) -> None:
        """Ends this process at once, and the others soon; does not return."""

    def collectives(self, ranks: Sequence[int]) -> Collectives:
        """Over those world ranks, ascending; all of them make it now."""

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A communicator of MPI, or a process group of torch, of those world ranks, ascending, that nobody
        else uses; all of them make it now."""

    def close(self) -> None:
        """Gives back what would be in the way of this process's next transport."""
