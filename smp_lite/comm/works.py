"""What a torch process group has under way, so that it can be polled."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist

from .waiting import broken_connections_named

__all__ = ["Ending", "Works"]


class Ending(Protocol):
    """A work under way."""

    def done(self) -> bool:
        """Whether it has ended; raises if it has failed."""


class Works:
    """The point-to-point works of one group.

    gloo's do not say that they have ended until somebody waits for them, so a thread for each direction and
    peer does, in the order of posting, which is the order in which they end.

    Args:
        group: the process group.
        by_gloo: whether gloo moves what they are about; None: if the group has nothing else.
    """

    def __init__(self, group: object, by_gloo: bool | None = None) -> None:
        has_gloo_alone = dist.get_backend(group) == "gloo"  # type: ignore[arg-type]
        self._needs_waiter = has_gloo_alone if by_gloo is None else by_gloo
        self._lanes: dict[tuple[str, int], _Lane] = {}

    def polled(self, work: object, direction: str, peer: int) -> Ending:
        if not self._needs_waiter:
            return _Polled(work)
        lane = (direction, peer)
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(f"smp-{direction}-{peer}")
        return _Awaited(self._lanes[lane].wait_for(work))


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


class _Polled:
    def __init__(self, work: object) -> None:
        self._work: object | None = work

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():  # type: ignore[attr-defined]
            with broken_connections_named():
                self._work.wait()  # type: ignore[attr-defined]
            self._work = None
        return self._work is None


class _Awaited:
    def __init__(self, ended: Future[None]) -> None:
        self._ended = ended

    def done(self) -> bool:
        if self._ended.done():
            with broken_connections_named():
                self._ended.result()
            return True
        return False
