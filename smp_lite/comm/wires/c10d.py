"""A wire over a torch process group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ...record.values.placed import TensorMeta
from ..layout import arrived, incoming_bytes, outgoing
from ..waiting import broken_connections_named
from .wire import Transfer

__all__ = ["C10dWire"]


class C10dWire:
    """A torch process group (gloo on CPU, NCCL with one GPU for each rank).

    gloo's point-to-point works do not say that they have ended until somebody waits for them, so a thread
    for each direction and peer does, in the order of posting, which is the order in which they end.

    Args:
        group: the process group of the mp group.
        rank_of_stage: for each stage the group's rank that holds it.
    """

    def __init__(self, group: object, rank_of_stage: Sequence[int]) -> None:
        self.group = group
        self.rank_of_stage = rank_of_stage
        self._needs_waiter = dist.get_backend(group) == "gloo"  # type: ignore[arg-type]
        self._lanes: dict[tuple[str, int], _Lane] = {}

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        message, _ = outgoing(tensor, meta, always_told=True)  # both ends name the same length
        work = dist.isend(message, group=self.group, group_dst=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return self._transfer(work, message, meta, ("send", stage))

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        message = torch.empty(incoming_bytes(meta), dtype=torch.uint8, device=meta.device)
        work = dist.irecv(message, group=self.group, group_src=self.rank_of_stage[stage])  # type: ignore[arg-type]
        return self._transfer(work, message, meta, ("receive", stage))

    def _transfer(
        self, work: object, message: torch.Tensor, meta: TensorMeta, direction: tuple[str, int]
    ) -> Transfer:
        if not self._needs_waiter:
            return _Work(work, message, meta)
        if direction not in self._lanes:
            self._lanes[direction] = _Lane("smp-{}-{}".format(*direction))
        return _Awaited(self._lanes[direction].wait_for(work), message, meta)


class _Lane:
    """A thread that waits for works, one after another.

    A daemon and no executor: a process that gives up, because a peer never sent, must be able to end.
    """

    def __init__(self, name: str) -> None:
        self._works: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait_for(self, work: object) -> Future[None]:
        ended: Future[None] = Future()
        self._works.put((work, ended))
        return ended

    def _run(self) -> None:
        while True:
            work, ended = self._works.get()
            try:
                work.wait()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            del work, ended  # a tensor must not live until the next one


class _Work:
    def __init__(self, work: object, message: torch.Tensor, meta: TensorMeta) -> None:
        self._work: object | None = work
        self._message, self._meta = message, meta

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():  # type: ignore[attr-defined]
            with broken_connections_named():
                self._work.wait()  # type: ignore[attr-defined]
            self._work = None
        return self._work is None

    def tensor(self) -> torch.Tensor:
        return arrived(self._message, self._meta, len(self._message))


class _Awaited:
    def __init__(self, ended: Future[None], message: torch.Tensor, meta: TensorMeta) -> None:
        self._ended, self._message, self._meta = ended, message, meta

    def done(self) -> bool:
        if self._ended.done():
            with broken_connections_named():
                self._ended.result()
            return True
        return False

    def tensor(self) -> torch.Tensor:
        return arrived(self._message, self._meta, len(self._message))
