"""Ranks meet before the model is cut, and after: one that has failed instead tells the others, and goes on.

Until then there is no runtime that ranks could hear each other by
(:meth:`~smp_lite.comm.groups.peers.Peers.fail`), and a rank whose first step ends by an error of its own
would be waited for.
"""

from __future__ import annotations

import torch

from ...comm.collectives import Pending
from ...comm.groups.peers import peer_failed
from ...comm.groups.world import World
from ...comm.unawaited import keep
from ...comm.waiting import wait_until
from ...devices import CPU
from ...errors import SMPTimeout
from ...record.state.random_state import put_back_states

__all__ = ["FirstMeeting"]

_FIRST_NUMBER = 1_000_000
"""Of failures: those of the runtime are counted from 1."""


class FirstMeeting:
    """Making one is collective over all ranks.

    Args:
        world: the job.
        share: the kind of group of ranks that get the same batch.
    """

    def __init__(self, world: World, share: str) -> None:
        self._world = world
        self._alike = world.group(share)
        self._ranks = world.group("WORLD")
        self._others = [rank for rank in self._ranks if rank != world.rank]
        self._collectives = world.collectives("WORLD")
        self._number = _FIRST_NUMBER

    def come(self) -> None:
        """Collective.

        Raises:
            PeerFailed: a rank has failed instead of coming; where it gets the same batch, random streams are
                where it has left them.
            SMPTimeout: one has not come.
        """
        pending, *memory = self._begin(0)
        try:
            wait_until(
                pending.done,
                lambda: "the first call of the model is collective: not all ranks have come to it",
                lambda: self._others,
            )
        except BaseException:
            keep(pending, memory)  # they may come yet
            raise
        _, theirs = memory
        failed = {rank: n for rank, n in zip(self._ranks, theirs.flatten().tolist(), strict=True) if n}
        if failed:
            heard = {rank: self._world.receive_failure(rank, number) for rank, number in failed.items()}
            if alike := [streams for rank, (_, streams) in heard.items() if rank in self._alike]:
                put_back_states(alike[0])
            first, (text, _) = next(iter(heard.items()))
            raise peer_failed(
                f"rank {first} failed in the first step, before the model was cut, so the step "
                f"cannot run: {text}. The next step can, if that rank goes on",
                text,
            )

    def fail(self, error: BaseException) -> None:
        """This rank will not come: tells the others."""
        if not isinstance(error, Exception) or isinstance(error, SMPTimeout):
            return
        self._number += 1
        pending, *memory = self._begin(self._number)
        keep(pending, memory)
        text = f"{type(error).__name__}: {error}"
        for posted in self._world.post_failure(self._number, text, self._others):
            keep(posted, text)

    def _begin(self, number: int) -> tuple[Pending, torch.Tensor, torch.Tensor]:
        """What is under way, and the memory that it reads and writes, to be held until it has ended."""
        mine = torch.tensor([number], dtype=torch.int64, device=CPU)
        theirs = torch.empty(len(self._ranks), 1, dtype=torch.int64, device=CPU)
        return self._collectives.all_gather(mine, theirs), mine, theirs
