"""Process groups that carry tensors of the pretended device: over gloo, and as late as NCCL's are.

A collective reads its tensors when it is started, as a device does whose stream has come there; who has made
them must have been waited for, or it is an error. From then on there is nonsense in what it makes. ``wait()``
gives it to the current stream (:mod:`.order`): what it makes is there when the stream that computes waits for
that one. Memory that is freed before that is an error. Tensors of the host go to gloo as they are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import lateness, order
from .backend import OWN_VARIABLE
from .memory import NAME, is_ours, on_host

__all__ = ["BACKEND", "PretendedGroup", "offered"]

BACKEND = "pretended_groups"


_aborted: list[PretendedGroup] = []
"""They stay: gloo's threads may wait for peers for good, and who deletes a group would wait for them."""


class PretendedGroup(dist.ProcessGroup):
    """See the module."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._size, self._rank = size, rank
        self.is_aborted = False

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo  # torch 2.14 asks it whether it sends several at once

    def abort(self) -> None:
        self.is_aborted = True
        self._gloo.abort()
        _aborted.append(self)

    def shutdown(self) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._run(tensors, tensors, lambda mine, _: self._gloo.allreduce([mine], opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._run(tensors, tensors, lambda mine, _: self._gloo.broadcast([mine], opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._run(tensors, tensors, lambda mine, _: self._gloo.reduce([mine], opts))

    def all_gather_single(self, got: torch.Tensor, sent: torch.Tensor, opts: Any) -> Any:
        def start(mine: torch.Tensor, rows: torch.Tensor) -> Any:
            return self._gloo.allgather([list(rows.view(self._size, *mine.shape))], [mine])

        return self._run([sent], [got], start)

    def allgather(self, got: list[list[torch.Tensor]], sent: list[torch.Tensor], opts: Any) -> Any:
        assert not is_ours(sent[0])
        return self._gloo.allgather(got, sent, opts)

    def reduce_scatter_single(self, got: torch.Tensor, sent: torch.Tensor, opts: Any) -> Any:
        def start(parts: torch.Tensor, mine: torch.Tensor) -> Any:
            work = self._gloo.allreduce([parts])  # gloo's own goes on only while somebody waits for it
            return _Part(work, parts.view(self._size, -1)[self._rank], mine)

        return self._run([sent], [got], start)

    def all_to_all_single(
        self, got: torch.Tensor, sent: torch.Tensor, got_sizes: Any, sent_sizes: Any, opts: Any
    ) -> Any:
        def start(mine: torch.Tensor, theirs: torch.Tensor) -> Any:
            return self._gloo.alltoall_base(theirs, mine, got_sizes, sent_sizes)

        return self._run([sent], [got], start)

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int) -> Any:
        return self._run(tensors, [], lambda mine: self._gloo.send([mine], dest, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._run([], tensors, lambda theirs: self._gloo.recv([theirs], source, tag))

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)

    def _run(self, sent: list[torch.Tensor], got: list[torch.Tensor], start: Callable[..., Any]) -> Any:
        """``start`` is given copies on the host: of what is sent and what is got, which may be one."""
        if not is_ours((sent or got)[0]):
            return start(*sent, *got)
        for tensor in (*sent, *got):
            lateness.check_waited(tensor)
        with _below():
            copies = [on_host(tensor, {}).clone() for tensor in (*sent, *got)]
            if sent and sent is got:
                copies[1] = copies[0]
            back = [(tensor, copies[len(sent) + number]) for number, tensor in enumerate(got)]
            return _Work(self, start(*copies), back, copies, (sent or got)[0].device.index or 0)


class _Part:
    """Of what all have summed."""

    def __init__(self, work: Any, part: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._part, self._target = work, part, target

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        self._target.view(-1).copy_(self._part)


class _Work(dist.Work):
    """One collective; see :class:`order.Late`."""

    def __init__(
        self,
        group: PretendedGroup,
        inner: Any,
        back: list[tuple[torch.Tensor, torch.Tensor]],
        keep: Any,
        index: int,
    ) -> None:
        super().__init__()
        self._group = group
        self._inner: Any = inner
        self._keep = keep
        self._index = index
        self._back = [(lateness.Ref(tensor), copy) for tensor, copy in back]
        self.is_done = False
        for tensor, _ in back:
            lateness.spoil(tensor)

    def is_completed(self) -> bool:
        inner = self._inner
        return inner is None or bool(inner.is_completed())

    has_ended = is_completed

    def wait(self, timeout: Any = None) -> bool:
        order.follow(self, self._index)
        return True

    def do(self) -> None:
        if self._inner is None or not self._comes():
            return
        with _below(), torch.no_grad():
            for there, copy in self._back:
                there.host().copy_(copy)
        self._inner = self._keep = None
        self._back = []

    def _comes(self) -> bool:
        """Waits; whether it has ended, and was not aborted or given up."""
        end = None if _patience_s is None else time.monotonic() + _patience_s
        while end is not None and not self._inner.is_completed():
            if time.monotonic() > end or self._group.is_aborted:
                order.wait_in_vain(self._is_over)
                return False
            time.sleep(0.001)
        try:
            self._inner.wait()
        except RuntimeError:
            if not self._group.is_aborted:
                raise
            return False
        return True

    def _is_over(self) -> bool:
        return self._group.is_aborted or self.is_completed()


_patience_s: float | None = None


@contextlib.contextmanager
def in_vain_after(seconds: float) -> Iterator[None]:
    """Within: the host goes on, with nonsense, where a collective does not end so soon.

    So it does on a real device anyway, until it reads something; here operations cannot be put off.
    """
    global _patience_s
    _patience_s = seconds
    try:
        yield
    finally:
        _patience_s = None


@contextlib.contextmanager
def _below() -> Iterator[None]:
    """Within: operations are those of the host."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


@contextlib.contextmanager
def offered(*, own: bool = True) -> Iterator[None]:
    """Within: torch knows them.

    Args:
        own: each process has devices of its own; else all share those of one number.
    """
    known = dist.Backend.default_device_backend_map
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, PretendedGroup, devices=[NAME])
    known[NAME] = BACKEND
    if own:
        os.environ[OWN_VARIABLE] = "1"
    try:
        yield
    finally:
        del known[NAME]
        os.environ.pop(OWN_VARIABLE, None)
