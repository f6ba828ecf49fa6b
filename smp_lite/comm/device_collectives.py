"""Collectives over tensors of a device, by those of the host: copied out, and back when they have ended.

Tensors that are the host's already go through as they are. Started in the order of the calls, each when its
copy has come to the host (:mod:`.outbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..devices import event, home, host_memory, is_host
from .collectives import Collectives, Pending
from .outbox import Outbox

__all__ = ["StagedCollectives", "of_device"]


def of_device(collectives: Collectives) -> Collectives:
    """The same for tensors of this process's device, if that is not the host itself."""
    return collectives if is_host(home()) else StagedCollectives(collectives)


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
