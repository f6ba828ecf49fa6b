"""A wire for tensors of a device that go from device to device, each announced by a small message.

The sender gives the tensor to a *carrier*, which starts what the device has to do, and tells the receiver by
a message over a wire of the host: how the tensor lies, and the carrier's *ticket*, by which the other side
gets at it. The receiver then queues the copy on a stream of its own, and the stream that computes waits for
that. Copies are queued in the order of the sends, whatever is asked for first: carriers count on it.

No host waits for a device: a receive is *done* as soon as its copy is queued, so hosts run ahead of the
devices, and what they wait for is each other's small messages alone.

The memory that arrives is taken on the receiving stream. Taken on the computing one it could be memory that
kernels in front of it still use, and the copy would have to wait for all of them.

Carriers: :mod:`.mapped`, between processes of one host, also on one device; :mod:`.grouped`, over process
groups that carry tensors of the device (NCCL).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

import torch

from ...device_streams import hand_to_current, side_stream, within
from ...devices import CPU, event
from ...record.values.placed import TensorMeta
from ..layout import bytes_of_row, room_for, row_of, row_of_bytes, spread
from .wire import Transfer, Wire

__all__ = ["AnnouncedWire", "Carrier", "Leaving"]


class Leaving(Protocol):
    """A row of bytes on its way to another stage."""

    def done(self) -> bool:
        """Polls: whether its memory is free for what is queued from now on."""


class Carrier(Protocol):
    """Carries rows of bytes between the devices of the stages.

    Attributes:
        ticket_bytes: how long its tickets are.
    """

    ticket_bytes: int

    def send(self, row: torch.Tensor, stage: int) -> tuple[bytes, Leaving]:
        """Starts to send what the current stream has computed; returns the ticket as well."""

    def receive(self, ticket: bytes, row: torch.Tensor, stage: int) -> None:
        """Queues the copy into ``row`` on the current stream, which made the row."""


class AnnouncedWire:
    """Tensors of this process's device.

    Args:
        inner: carries the announcements, between the same stages.
        carrier: carries the tensors.
    """

    def __init__(self, inner: Wire, carrier: Carrier) -> None:
        self.inner = inner
        self.carrier = carrier
        self._stream = side_stream()
        self._expected: dict[int, deque[_Receiving]] = {}  # by stage, in the order of posting

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        row, stride = row_of(tensor, meta)
        ticket, leaving = self.carrier.send(row, stage)
        message = row_of_bytes(struct.pack(f"={len(stride)}q", *stride) + ticket)
        return _Sending(self.inner.send(message, self._form(meta), stage), leaving)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        receiving = _Receiving(self, self.inner.receive(self._form(meta), stage), meta, stage)
        self._expected.setdefault(stage, deque()).append(receiving)
        return receiving

    def advance(self, stage: int) -> None:
        """Queues the copies of what the stage has announced."""
        expected = self._expected[stage]
        while expected and expected[0].announced.done():
            receiving = expected.popleft()
            message = bytes_of_row(receiving.announced.tensor())
            receiving.taken = self._take(message, receiving.meta, stage)

    def _take(self, message: bytes, meta: TensorMeta, stage: int) -> tuple[torch.Tensor, object | None]:
        """Queues one copy: the tensor, and the event after which it is there."""
        head = 8 * len(meta.shape)
        stride = struct.unpack(f"={len(meta.shape)}q", message[:head])
        with within(self._stream):
            row = room_for(meta, stride)
            self.carrier.receive(message[head:], row, stage)
            return spread(row, meta, stride), event()

    def _form(self, meta: TensorMeta) -> TensorMeta:
        """Of the announcement of a tensor."""
        num_bytes = 8 * len(meta.shape) + self.carrier.ticket_bytes
        return TensorMeta((num_bytes,), (1,), torch.uint8, CPU, False)


class _Sending:
    def __init__(self, announcing: Transfer, leaving: Leaving) -> None:
        self._parts = [announcing, leaving]

    def done(self) -> bool:
        while self._parts and self._parts[-1].done():
            self._parts.pop()
        return not self._parts

    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a send carries no result")


class _Receiving:
    def __init__(self, wire: AnnouncedWire, announced: Transfer, meta: TensorMeta, stage: int) -> None:
        self._wire, self._stage = wire, stage
        self.announced, self.meta = announced, meta
        self.taken: tuple[torch.Tensor, object | None] | None = None

    def done(self) -> bool:
        if self.taken is None:
            self._wire.advance(self._stage)
        return self.taken is not None

    def tensor(self) -> torch.Tensor:
        assert self.taken is not None
        tensor, ready = self.taken
        hand_to_current(tensor, ready)
        return tensor
