"""The ranks of a job without MPI: they meet at torch's TCPStore, and their tensors travel over gloo.

torchrun offers a store that outlives the ranks. By other launchers rank 0 offers it, and therefore stays,
when its script has ended, until the others have left.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import SMPError
from ..collectives import C10dCollectives, Pending
from ..waiting import wait_until, watchdog_s
from .gloo import destroy_process_groups, init_gloo, new_gloo_group
from .launcher import AtRendezvous
from .mailbox import Mailbox
from .transport import Host, Tag

__all__ = ["StoreTransport"]

_RANK = struct.Struct("<I")
_TOLD_S = 2.0
"""How long a store stays for ranks that are to read what is wrong."""

_num_transports = 0  # of this process so far, the same on all ranks: keeps their keys apart


class StoreTransport:
    """The processes that meet at one store.

    Args:
        launch: where, and as which rank.

    Raises:
        SMPError: the store cannot be offered or reached.
        SMPTimeout: ranks did not come; names them.
    """

    has_mpi = False

    def __init__(self, launch: AtRendezvous) -> None:
        global _num_transports
        self.rank, self.size = launch.rank, launch.size
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._offers_store = self.rank == 0 and not launch.store_is_there
        where = f"{launch.address}:{launch.port}"
        store = dist.PrefixStore(f"smp_lite/{_num_transports}", _open_store(launch, self._offers_store))
        _num_transports += 1
        self._mailbox = Mailbox(store, self.rank, where)
        self._departed: dict[int, bytes] = {}
        hosts = self._meet(where)
        neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank = neighbours.index(self.rank) if launch.local_rank is None else launch.local_rank
        self.local_size = len(neighbours) if launch.local_size is None else launch.local_size
        one_machine = len({host.machine for host in hosts}) == 1
        init_gloo(dist.PrefixStore("gloo", store), self.rank, self.size, one_machine=one_machine)

    def _meet(self, where: str) -> list[Host]:
        """Waits for all ranks; where each of them runs."""
        self._mailbox.put(f"size/{self.rank}", str(self.size).encode())
        self._mailbox.put(f"host/{self.rank}", "\n".join(Host.here()).encode())
        missing = list(range(self.size))

        def all_there() -> bool:
            for rank in list(missing):
                if self._mailbox.holds(f"host/{rank}"):
                    self._check_size(rank, int(self._mailbox.read(f"size/{rank}")))
                    missing.remove(rank)
            return not missing

        wait_until(
            all_there,
            lambda: (
                f"rank(s) {', '.join(map(str, missing))} of {self.size} did not come to smp.init at {where}"
            ),
        )
        return [Host(*self._mailbox.read(f"host/{rank}").decode().split("\n")) for rank in range(self.size)]

    def _check_size(self, rank: int, size: int) -> None:
        if size == self.size:
            return
        if self._offers_store:
            time.sleep(_TOLD_S)
        raise SMPError(
            f"WORLD_SIZE is {self.size} on rank {self.rank}, and {size} on rank {rank}: give all the same"
        )

    # Messages -----------------------------------------------------------------------------------------------

    def send(self, data: bytes, dest: int, tag: Tag, *, until_taken: bool = False) -> Pending:
        return self._mailbox.post(data, dest, tag, until_taken=until_taken)

    def receive(self, source: int, tag: Tag) -> bytes | None:
        return self._mailbox.take(source, tag)

    def notify(self, data: bytes, dest: int) -> None:
        self._mailbox.append(f"notices/{dest}", _RANK.pack(self.rank) + data)

    def notices(self) -> list[tuple[int, bytes]]:
        found = self._mailbox.read_on(f"notices/{self.rank}", delete=True)
        return [(_RANK.unpack_from(data)[0], data[_RANK.size :]) for data in found]

    # Leaving ------------------------------------------------------------------------------------------------

    def departed(self) -> Mapping[int, bytes]:
        for data in self._mailbox.read_on("gone"):
            self._departed[_RANK.unpack_from(data)[0]] = data[_RANK.size :]
        return self._departed

    def leave(self, last_words: bytes, told: Sequence[int]) -> None:
        with contextlib.suppress(SMPError):
            self._mailbox.append("gone", _RANK.pack(self.rank) + last_words)
        if self._offers_store:
            wait_until(
                lambda: self.departed().keys() >= {*self._others},
                lambda: (
                    f"rank 0 has ended, but rank(s) {sorted({*self._others} - self._departed.keys())} have "
                    "not, which need its store"
                ),
            )

    def meet_at_end(self, limit_s: float) -> None:
        """Nothing: rank 0, whose store it is, has waited for the others as it left."""

    def abort(self, exit_code: int) -> None:
        """Ends this process without waiting for its threads, which may wait for other ranks.

        The launcher ends the others, or they learn from the store that this one has gone.
        """
        with contextlib.suppress(SMPError):
            self._mailbox.append("gone", _RANK.pack(self.rank))
        os._exit(exit_code)

    def close(self) -> None:
        destroy_process_groups()

    # Groups -------------------------------------------------------------------------------------------------

    def collectives(self, ranks: Sequence[int]) -> C10dCollectives:
        return C10dCollectives(new_gloo_group(ranks))

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return new_gloo_group(ranks)


def _open_store(launch: AtRendezvous, offers: bool) -> dist.TCPStore:
    """This rank's end of the store, within the watchdog's limit."""
    try:
        # multi_tenant: a script that has called dist.init_process_group() listens on the port already.
        return dist.TCPStore(
            launch.address,
            launch.port,
            is_master=offers,
            timeout=timedelta(seconds=watchdog_s()),
            wait_for_workers=False,
            multi_tenant=launch.port != 0,
        )
    except (RuntimeError, ValueError) as error:
        does = "cannot listen at" if offers else "cannot reach rank 0 at"
        raise SMPError(
            f"rank {launch.rank} {does} {launch.address}:{launch.port}: {str(error).splitlines()[0]}. "
            "MASTER_ADDR must be rank 0's host, and MASTER_PORT a free port there, on all ranks"
        ) from error
