"""Collectives over tensors of a device: among the devices (:class:`ByPlace`), or by those of the host.

The latter are copied out, and back when they have ended. Tensors that are the host's already go through as
they are. Started in the order of the calls, each when its copy has come to the host (:mod:`.outbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...devices import event, host_memory, is_host
from ..collectives import Collectives, Pending
from .mapped import MappedCollectives
from .outbox import Outbox
from .queued import QueuedCollectives

__all__ = ["ByPlace", "StagedCollectives"]


class ByPlace:
    """See :class:`~.collectives.Collectives`: one make for tensors of the host, one for those of the device.

    Args:
        host: for tensors of the host.
        device: for tensors of this process's device, between the same ranks.
    """

    def __init__(self, host: Collectives, device: QueuedCollectives | MappedCollectives) -> None:
        self.host, self.device = host, device
        self.size = host.size

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        return self._for(tensor).all_reduce(tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        return self._for(tensor).reduce(tensor, root)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        return self._for(tensor).broadcast(tensor, root)

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        return self._for(mine).all_gather(mine, all_of_them)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        return self._for(parts).reduce_scatter(parts, mine)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        return self._for(sent).all_to_all(sent, got)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        return self._for(sent).exchange(sent, dest, got, source)

    def abort(self) -> None:
        """What is under way between devices is given up."""
        self.device.abort()

    def _for(self, tensor: torch.Tensor) -> Collectives:
        return self.host if is_host(tensor.device) else self.device


class StagedCollectives:
    """See :class:`~.collectives.Collectives`."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.size = inner.size
        self._outbox = Outbox()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Pending:
        return self._staged([tensor], [tensor], lambda mine: self.inner.all_reduce(mine, op))

    def reduce(self, tensor: torch.Tensor, root: int) -> Pending:
        return self._staged([tensor], [tensor], lambda mine: self.inner.reduce(mine, root))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        return self._staged([tensor], [tensor], lambda mine: self.inner.broadcast(mine, root))

    def all_gather(self, mine: torch.Tensor, all_of_them: torch.Tensor) -> Pending:
        return self._staged([mine], [all_of_them], self.inner.all_gather)

    def reduce_scatter(self, parts: torch.Tensor, mine: torch.Tensor) -> Pending:
        return self._staged([parts], [mine], self.inner.reduce_scatter)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        return self._staged([sent], [got], self.inner.all_to_all)

    def exchange(self, sent: torch.Tensor, dest: int, got: torch.Tensor, source: int) -> Pending:
        def start(mine: torch.Tensor, theirs: torch.Tensor) -> Pending:
            return self.inner.exchange(mine, dest, theirs, source)

        return self._staged([sent], [got], start)

    def _staged(
        self, sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor], start: Callable[..., Pending]
    ) -> Pending:
        """``start`` is given the host's copies of both; of a tensor that is in both, one."""
        hosts: dict[int, torch.Tensor] = {}
        for tensor in (*sent, *got):
            if id(tensor) not in hosts:
                hosts[id(tensor)] = tensor if is_host(tensor.device) else _like_on_host(tensor)
        copied = False
        for tensor in sent:
            if hosts[id(tensor)] is not tensor:
                hosts[id(tensor)].copy_(tensor.detach(), non_blocking=True)
                copied = True
        arguments = list(hosts.values())
        posted = self._outbox.post(event() if copied else None, lambda: start(*arguments))
        back = [(tensor, hosts[id(tensor)]) for tensor in got if hosts[id(tensor)] is not tensor]
        return _Staged(posted, back, sent)


def _like_on_host(tensor: torch.Tensor) -> torch.Tensor:
    row = host_memory(tensor.numel() * tensor.element_size())
    return row.view(tensor.dtype).view(tensor.shape)


class _Staged:
    def __init__(
        self, pending: Pending, back: Sequence[tuple[torch.Tensor, torch.Tensor]], keep: object
    ) -> None:
        self._pending: Pending | None = pending
        self._back, self._keep = back, keep

    def done(self) -> bool:
        if self._pending is not None and self._pending.done():
            with torch.no_grad():
                for tensor, host in self._back:
                    tensor.detach().copy_(host, non_blocking=True)
            self._pending = self._keep = None
        return self._pending is None
