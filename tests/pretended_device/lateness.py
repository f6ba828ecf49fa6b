"""Copies that end late: a copy into pinned memory is not there until something has waited for it.

Until then the memory holds nonsense, so whoever reads it too early, as on a real device, reads that.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
_late: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
_POLLS = 2
"""How often an event says that it has not happened yet."""


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy of a CPU tensor that a device copies to and from by itself."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin {tensor.type()!r}: only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        copy = tensor.detach().clone()
        storage = copy.untyped_storage()
        storage.pretended_pinned = True  # type: ignore[attr-defined]  # lives as long as the memory
        return copy


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return getattr(tensor.untyped_storage(), "pretended_pinned", False)


def copy_late(target: torch.Tensor, source: torch.Tensor, index: int) -> None:
    """Copies when somebody waits."""
    _late.setdefault(index or 0, []).append((target.detach(), source.clone()))
    if target.is_contiguous() and target.dim():
        target.view(torch.uint8).fill_(0xA5)


def number(index: int) -> int:
    """How many copies have not ended."""
    return len(_late.get(index, ()))


def finish(index: int, upto: int | None = None) -> None:
    """Does what is late, or the first of it."""
    late = _late.get(index, [])
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        while late and (upto is None or upto > 0):
            target, source = late.pop(0)
            target.copy_(source)
            upto = None if upto is None else upto - 1


class Stream:
    """The device's one stream, in which everything happens in order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device_index = torch.device(device).index or 0 if device is not None else 0
        self.stream_id = 0

    def synchronize(self) -> None:
        finish(self.device_index)

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """There is one stream."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not number(self.device_index)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    """A place in the stream; it is polled some times until it has happened."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._after: list[Any] = []
        self._index = 0
        self._polls = 0
        self._is_timed, self._time_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time_s = time.perf_counter()
        self._index = stream.device_index if stream is not None else _current()
        self._after = list(_late.get(self._index, ()))
        self._polls = _POLLS if self._after else 0

    def query(self) -> bool:
        if self._polls:
            self._polls -= 1
            return False
        self.synchronize()
        return True

    def elapsed_time(self, other: Event) -> float:
        if not (self._is_timed and other._is_timed):
            raise RuntimeError("both events must be made with enable_timing")
        return (other._time_s - self._time_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """What follows in the stream follows anyway."""

    def synchronize(self) -> None:
        self._polls = 0
        late = _late.get(self._index, [])
        last = max((i for i, each in enumerate(late) if any(each is own for own in self._after)), default=-1)
        finish(self._index, last + 1)
        self._after = []


def _current() -> int:
    from .backend import MODULE

    return MODULE.current_device()
