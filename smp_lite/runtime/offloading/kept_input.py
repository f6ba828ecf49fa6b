"""An input of a checkpointed call, which can leave memory and come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...comm.waiting import watchdog_s
from ...devices import home
from ...errors import SMPError
from ...record.describe.recomputed import changed_since
from .store import Store, Transfer

__all__ = ["KeptInput", "can_leave"]


class KeptInput:
    """An input of a checkpointed call, in memory or in the store."""

    def __init__(self, tensor: torch.Tensor, store: Callable[[], Store]) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()  # of our own: torch counts it by itself
        self.version = tensor._version
        self.store = store
        self.place: Any = None
        self.writing: Transfer | None = None
        self.reading: tuple[Transfer, torch.Tensor] | None = None
        start, self._length = _span(tensor)
        self._start = start - tensor.storage_offset()
        self._form = (tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it was made of this very part of memory, which many calls may be given."""
        own = self.tensor
        return (
            own is not None
            and own.storage_offset() == tensor.storage_offset()
            and self._form == (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            and own.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            and self.version == tensor._version
        )

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory that the tensor lies in, gaps included."""
        size = tensor.element_size()
        start = (tensor.storage_offset() + self._start) * size
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), start, (self._length * size,))  # type: ignore[arg-type]

    @property
    def num_bytes(self) -> int:
        return self._length * self._form[2].itemsize

    def leave(self) -> None:
        """Begins to write it."""
        assert self.tensor is not None
        store = self.store()
        self.place = store.place(self.num_bytes)
        weakref.finalize(self, store.free, self.place, self.num_bytes)
        self.writing = store.write(self._bytes(self.tensor), self.place)

    def has_left(self, *, must: bool = False) -> bool:
        """Whether its memory may be let go of; if so, it is.

        Args:
            must: what is computed next waits for it, where that takes no wait of the host.
        """
        if self.writing is None or not (self.writing.followed() if must else self.writing.done()):
            return False
        self.check()
        self.writing = self.tensor = None
        return True

    def come_back(self) -> None:
        """Begins to read it, unless it is in memory."""
        if self.tensor is not None or self.reading is not None:
            return
        assert self.place is not None
        shape, stride, dtype = self._form
        memory = torch.empty(self._length, dtype=dtype, device=home())
        tensor = memory.as_strided(shape, stride, -self._start)
        self.reading = self.store().read(memory.view(torch.uint8), self.place), tensor

    def is_here(self) -> bool:
        """Whether what is computed next finds it."""
        return self.tensor is not None or (self.reading is not None and self.reading[0].followed())

    def check(self) -> None:
        """Raises SMPError if it has changed in place since the call."""
        if self.tensor is not None and self.tensor._version != self.version:
            raise changed_since("an argument of a checkpointed call")

    def get(self) -> torch.Tensor:
        """For backward."""
        self.check()
        if self.tensor is not None:
            return self.tensor
        self.come_back()
        assert self.reading is not None
        transfer, tensor = self.reading
        if not transfer.wait(watchdog_s()):
            raise SMPError(
                f"waited {watchdog_s():g} s for {self.num_bytes} bytes of offloaded activations from "
                f"{self.store().name}"
            )
        return tensor


def can_leave(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be written to a store and read again."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not isinstance(tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device == home()
        and tensor.numel() > 0
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First element and number of elements, in its storage, of what the tensor covers, gaps included."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset(), last + 1
