"""A wire over a torch process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...record.values.placed import TensorMeta
from ..layout import arrived, incoming_bytes, outgoing
from ..works import Ending, Works
from .wire import Transfer

__all__ = ["C10dWire"]


class C10dWire:
    """A torch process group (gloo on CPU, NCCL with one GPU for each rank).

    Args:
        group: the process group of the mp group.
        rank_of_stage: for each stage the group's rank that holds it.
    """

    def __init__(self, group: object, rank_of_stage: Sequence[int]) -> None:
        self.group = group
        self.rank_of_stage = rank_of_stage
        self._works = Works(group)

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        message, _ = outgoing(tensor, meta, always_told=True)  # both ends name the same length
        work = dist.isend(message, group=self.group, group_dst=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return _Message(self._works.polled(work, "send", stage), message, meta)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        message = torch.empty(incoming_bytes(meta), dtype=torch.uint8, device=meta.device)
        work = dist.irecv(message, group=self.group, group_src=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return _Message(self._works.polled(work, "receive", stage), message, meta)


class _Message:
    def __init__(self, under_way: Ending, message: torch.Tensor, meta: TensorMeta) -> None:
        self.done = under_way.done
        self._message, self._meta = message, meta

    def tensor(self) -> torch.Tensor:
        return arrived(self._message, self._meta, len(self._message))
