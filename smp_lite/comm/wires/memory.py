"""A wire within one process."""

from __future__ import annotations

from collections import deque

import torch

from ...record.values.placed import TensorMeta
from ..layout import handed_over
from .wire import Transfer

__all__ = ["MemoryWire"]


class MemoryWire:
    """The stages of one process: a tensor is handed over as it is, in a queue for each pair of stages."""

    def __init__(self, stage_index: int, queues: dict[tuple[int, int], deque[torch.Tensor]]) -> None:
        self.stage_index = stage_index
        self.queues = queues
        self._claims: dict[int, deque[_Queued]] = {}

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        self.queues.setdefault((self.stage_index, stage), deque()).append(handed_over(tensor))
        return _Done()

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        queue = self.queues.setdefault((stage, self.stage_index), deque())
        return _Queued(queue, self._claims.setdefault(stage, deque()))


class _Done:
    def done(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a send carries no result")


class _Queued:
    """A posted receive; receives of one pair are served in the order of posting."""

    def __init__(self, queue: deque[torch.Tensor], claims: deque[_Queued]) -> None:
        self._queue, self._claims = queue, claims
        self._tensor: torch.Tensor | None = None
        claims.append(self)

    def done(self) -> bool:
        while self._queue and self._claims:
            self._claims.popleft()._tensor = self._queue.popleft()
        return self._tensor is not None

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor
