"""A wire for tensors of a device over one that carries the host's: by copies through pinned memory.

What travels is one row of bytes of a length that both ends know: the memory that the tensor spans, and its
strides (:mod:`..layout`). The copy out is queued on the device's stream, and the message starts when an event
says that it has ended (:mod:`..on_device.outbox`); the copy in is queued on the stream that will compute
with it. The host waits for neither. A device without events copies at once.
"""

from __future__ import annotations

import torch

from ...devices import CPU, event, host_memory
from ...record.values.placed import TensorMeta
from ..layout import arrived_from_host, incoming_bytes, row_of
from ..on_device.outbox import Outbox, Posted
from .wire import Transfer, Wire

__all__ = ["StagedWire"]


class StagedWire:
    """Tensors of this process's device, over a wire for those of the host.

    Args:
        inner: between the same stages.
    """

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self._outbox = Outbox()

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        row, stride = row_of(tensor, meta)
        message = host_memory(incoming_bytes(meta))
        message[: row.numel()].copy_(row, non_blocking=True)
        message[meta.num_bytes :] = torch.tensor(stride, dtype=torch.int64, device=CPU).view(torch.uint8)
        form = _form_of(meta)
        # The device reads the row until the event has happened.
        return _Sending(self._outbox.post(event(), lambda: self.inner.send(message, form, stage)), row)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        return _Receiving(self.inner.receive(_form_of(meta), stage), meta)


def _form_of(meta: TensorMeta) -> TensorMeta:
    """Of the row of bytes that a tensor travels as."""
    return TensorMeta((incoming_bytes(meta),), (1,), torch.uint8, CPU, False)


class _Sending:
    def __init__(self, posted: Posted, row: torch.Tensor) -> None:
        self._posted = posted
        self._row: torch.Tensor | None = row

    def done(self) -> bool:
        if self._posted.started is not None:
            self._row = None
        return self._posted.done()

    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a send carries no result")


class _Receiving:
    def __init__(self, inner: Transfer, meta: TensorMeta) -> None:
        self._inner: Transfer | None = inner
        self._meta = meta
        self._tensor: torch.Tensor | None = None

    def done(self) -> bool:
        return self._inner is None or self._inner.done()

    def tensor(self) -> torch.Tensor:
        if self._inner is not None:
            self._tensor = arrived_from_host(self._inner.tensor(), self._meta)
            self._inner = None
        assert self._tensor is not None
        return self._tensor
