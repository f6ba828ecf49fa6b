"""Rows of bytes from device to device over process groups that carry the device's memory: NCCL's.

A process group runs what one pair of ranks sends and receives one after another, and on a device a send
holds up what is queued behind it until the other side has queued its receive. So there are two groups, one
for each direction: towards later stages, and back. Each is used in the order of the announcements, which is
the same at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..waiting import broken_connections_named
from ..works import Ending, Works

__all__ = ["GroupedCarrier"]


class GroupedCarrier:
    """See :class:`~.announced.Carrier`. Making one is collective over the groups.

    A pair of ranks connects when it is used first, which takes both of them at the same time. So all pairs do
    that here, in one order.

    Args:
        onward, back: process groups of the same ranks.
        stage_index: this rank's.
        rank_of_stage: for each stage the groups' rank that holds it.
        device: of this process.
    """

    ticket_bytes = 0

    def __init__(
        self, onward: Any, back: Any, stage_index: int, rank_of_stage: Sequence[int], device: torch.device
    ) -> None:
        self._onward, self._back = onward, back
        self._stage_index = stage_index
        self._rank_of_stage = rank_of_stage
        self._works = Works(onward), Works(back)
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for first in range(len(rank_of_stage)):
            for second in range(first + 1, len(rank_of_stage)):
                for source, dest in ((first, second), (second, first)):
                    if stage_index == source:
                        self.send(byte, dest)
                    elif stage_index == dest:
                        self.receive(b"", torch.empty_like(byte), source)

    def send(self, row: torch.Tensor, stage: int) -> tuple[bytes, _Leaving]:
        onward = stage > self._stage_index
        group, works = (self._onward, self._works[0]) if onward else (self._back, self._works[1])
        work = dist.isend(row, group=group, group_dst=self._rank_of_stage[stage])
        return b"", _Leaving(works.polled(work, "send", stage), row)

    def receive(self, ticket: bytes, row: torch.Tensor, stage: int) -> None:
        group = self._onward if stage < self._stage_index else self._back
        with broken_connections_named():
            work = dist.irecv(row, group=group, group_src=self._rank_of_stage[stage])
            assert work is not None
            work.wait()  # the current stream does, not the host


class _Leaving:
    """Its memory is read until the work has ended: nothing may change it before that."""

    def __init__(self, under_way: Ending, row: torch.Tensor) -> None:
        self.done = under_way.done
        self._row = row
