"""Rows of bytes from device to device between processes of one host: the receiver reads the sender's memory.

Nothing is copied on the sender's side. Its ticket names the memory, and an event after which what is in there
has been computed. The receiver waits for that event on the device, copies, and answers with an event of its
own, after which the memory may be used for something else: the sender keeps the tensor until it has that
answer, and whatever it queues from then on waits for the event. (That is late enough to cost nothing, and
holds for parameters as well, which an optimizer changes where they are.)

Events are used again when the other side has queued its wait for them: the sender's when the answer has come,
the receiver's in turn (waiting for a later place in a stream of copies is only longer).

What a device offers for this is a :class:`~..on_device.sharing.Sharing`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...devices import CPU, record
from ...record.values.placed import TensorMeta
from ..layout import bytes_of_row, row_of_bytes
from ..on_device.sharing import Sharing
from .wire import Transfer, Wire

__all__ = ["MappedCarrier"]

_NUM_ANSWERS = 64
"""Events of a receiver: so many copies may be under way until the first is waited for a little longer."""


class MappedCarrier:
    """See :class:`~.announced.Carrier`.

    Args:
        sharing: what the device offers.
        answers: a wire of the host, for this alone.
    """

    def __init__(self, sharing: Sharing, answers: Wire) -> None:
        self.ticket_bytes = sharing.name_bytes + sharing.handle_bytes
        self._sharing, self._answers = sharing, answers
        self._form = TensorMeta((sharing.handle_bytes,), (1,), torch.uint8, CPU, False)
        self._free: list[Any] = []
        self._own: list[Any] = []
        self._next = 0
        self._answering: list[Transfer] = []

    def send(self, row: torch.Tensor, stage: int) -> tuple[bytes, _Leaving]:
        sharing = self._sharing
        computed = self._free.pop() if self._free else sharing.event()
        record(computed)
        ticket = sharing.name(row) + sharing.handle(computed)
        answer = self._answers.receive(self._form, stage)
        return ticket, _Leaving(row, answer, partial(self._answered, computed))

    def _answered(self, computed: Any, handle: bytes) -> None:
        self._sharing.wait(handle)
        self._free.append(computed)

    def receive(self, ticket: bytes, row: torch.Tensor, stage: int) -> None:
        sharing = self._sharing
        name, computed = ticket[: sharing.name_bytes], ticket[sharing.name_bytes :]
        sharing.wait(computed)
        sharing.copy(name, row)
        if len(self._own) < _NUM_ANSWERS:
            self._own.append(sharing.event())
        copied = self._own[self._next % _NUM_ANSWERS]
        self._next += 1
        record(copied)
        self._answering = [sent for sent in self._answering if not sent.done()]
        handle = row_of_bytes(sharing.handle(copied))
        self._answering.append(self._answers.send(handle, self._form, stage))


class _Leaving:
    def __init__(self, row: torch.Tensor, answer: Transfer, answered: Callable[[bytes], None]) -> None:
        self._row: torch.Tensor | None = row  # the receiver reads its memory
        self._answer, self._answered = answer, answered

    def done(self) -> bool:
        if self._row is not None and self._answer.done():
            self._answered(bytes_of_row(self._answer.tensor()))
            self._row = None
        return self._row is None
