"""Copies that end late: a copy into pinned memory is not there until something has waited for it.

Until then the memory holds nonsense, so whoever reads it too early, as on a real device, reads that.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

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


class Late(Protocol):
    """Something that a stream waits for: until it has ended, what it makes is nonsense."""

    def has_ended(self) -> bool:
        """Whether nobody would have to wait for it."""

    def finish(self) -> None:
        """Waits, and puts in place what it makes. Once is enough."""


_awaited: dict[int, list[Late]] = {}
"""By number of a stream beside the one that computes: what it waits for before it goes on."""


def follow(late: Late) -> None:
    """The current stream goes on after it. The one that computes cannot, here, without the host."""
    stream = _module().current_stream()
    if stream.stream_id:
        _awaited.setdefault(stream.stream_id, []).append(late)
    else:
        late.finish()


_in_vain: list[Callable[[], bool]] = []


def wait_in_vain(is_over: Callable[[], bool]) -> None:
    """The device stands still until that is so, and the host when it reads what the device has."""
    _in_vain.append(is_over)


def before_reading() -> None:
    """The host wants to read something."""
    while _in_vain and not all(is_over() for is_over in _in_vain):
        time.sleep(0.001)
    _in_vain.clear()


def catch_up() -> None:
    """Before an operation, which happens at once: what its stream waits for has ended."""
    if _awaited and (stream := _module().current_stream()).stream_id:
        for late in _awaited.pop(stream.stream_id, []):
            late.finish()


def finish_awaited() -> None:
    """What any stream waits for."""
    while _awaited:
        for late in _awaited.popitem()[1]:
            late.finish()


class Stream:
    """A stream, in which everything happens in order; in another it happens when that is asked to wait.

    That is so of what the device does with others' devices alone. What it computes is there at once.
    """

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device_index = torch.device(device).index or 0 if device is not None else _current()
        type(self)._count += 1
        self.stream_id = self._count

    @classmethod
    def that_computes(cls, index: int) -> Stream:
        """The device's own."""
        stream = cls.__new__(cls)
        stream.device_index, stream.stream_id = index, 0
        return stream

    def synchronize(self) -> None:
        finish(self.device_index)
        for late in _awaited.pop(self.stream_id, []):
            late.finish()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not number(self.device_index) and all(
            late.has_ended() for late in _awaited.get(self.stream_id, ())
        )

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
        self._awaited: list[Late] = []
        self._index = 0
        self._polls = 0
        self._is_timed, self._time_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time_s = time.perf_counter()
        stream = stream or _module().current_stream()
        self._index = stream.device_index
        self._awaited = list(_awaited.get(stream.stream_id, ()))
        self._after = list(_late.get(self._index, ()))
        self._polls = _POLLS if self._after else 0

    def query(self) -> bool:
        if threading.current_thread().name == "smp-device-watch":  # looks, and changes nothing
            return not self._polls and all(late.has_ended() for late in self._awaited)
        if not all(late.has_ended() for late in self._awaited):
            return False
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
        for each in self._awaited:
            each.finish()


def _module() -> Any:
    from .backend import MODULE

    return MODULE


def _current() -> int:
    return int(_module().current_device())
