"""The device of this process: decided once, when a session begins, and named in no other place.

All else asks here: for the device, for its random streams, for memory of the host that it copies to and from
by itself, for an event in its stream. What torch offers for every accelerator is used (``torch.accelerator``
and the device's own module), so a new kind of device needs no change.

A rank drives the accelerator of its ``local_rank``. Where a host has fewer of them than ranks, ranks share
one, by turns. Tensors that are described without their data, and those of other ranks, have this process's
device as well: a rank's recording speaks of one device only, and ranks compare its type, not its number.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .errors import SMPError
from .smp_v1 import cuda_as_cpu

__all__ = [
    "CPU",
    "DEVICE_VARIABLE",
    "Choice",
    "Event",
    "autocast_types",
    "check_current",
    "choose",
    "chosen_here",
    "current_stream",
    "event",
    "generators",
    "here",
    "home",
    "host_memory",
    "is_host",
    "make_current",
    "memory_of_home",
    "module",
    "on_home",
    "physical",
    "record",
    "set_home",
    "synchronize",
    "timed_event",
]

DEVICE_VARIABLE = "SMP_LITE_DEVICE"
"""``cpu``, or the accelerator's type, with or without a number (``cuda``, ``cuda:1``)."""

CPU = torch.device("cpu")


class Choice(NamedTuple):
    """A device, and what is to be said of it: "" where it is the CPU and nobody has asked."""

    device: torch.device
    text: str


class Memory(NamedTuple):
    """Bytes of a device: what tensors of this process have, what torch has of it, what there is."""

    allocated: int
    reserved: int
    total: int


class Event(Protocol):
    """A place in a device's stream."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Waits until it has."""


def choose(environment: Mapping[str, str], local_rank: int, local_size: int) -> Choice:
    """The device of a rank.

    Args:
        environment: with the variable, or without.
        local_rank: the rank's number on its host.
        local_size: number of ranks there.

    Raises:
        SMPError: the variable names what is not there.
    """
    wanted = environment.get(DEVICE_VARIABLE)
    found = None if cuda_as_cpu.is_on() else torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None else 0
    if wanted is None:
        if found is None:
            return Choice(CPU, "")
        return _by_rank(found.type, count, local_rank, local_size)
    has = "no accelerator" if found is None else f"{count} device(s) of type {found.type!r}"
    problem = f"{DEVICE_VARIABLE}={wanted!r}: torch finds {has} here"
    way_out = f"leave {DEVICE_VARIABLE} out, which takes what there is, or set it to 'cpu'"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise SMPError(f"{problem}, and this is no name of a device: {way_out}") from None
    if device.type == CPU.type:
        return Choice(CPU, f"device cpu, by {DEVICE_VARIABLE}")
    if found is None or device.type != found.type:
        raise SMPError(f"{problem}: {way_out}")
    if device.index is None:
        return _by_rank(found.type, count, local_rank, local_size)
    if device.index >= count:
        raise SMPError(f"{problem}, numbered from 0: {way_out}")
    return Choice(device, f"device {device}, by {DEVICE_VARIABLE}")


def _by_rank(kind: str, count: int, local_rank: int, local_size: int) -> Choice:
    device = torch.device(kind, local_rank % count)
    if local_size <= count:
        return Choice(device, f"device {device}, one for each of {local_size} rank(s) of this host")
    text = f"this host has {local_size} ranks, and this one sees {count} device(s)"
    return Choice(device, f"device {device}: {text}")


_home = CPU
_has_pinned: dict[str, bool] = {}


def home() -> torch.device:
    """This process's device; the CPU where there is no session."""
    return _home


def set_home(device: torch.device) -> None:
    """The device from now on; torch's current device is the same."""
    global _home
    _home = device
    make_current()


def make_current() -> None:
    """In this thread, too, torch's current device is this process's."""
    if not is_host(_home):
        torch.accelerator.set_device_index(_home.index)


def check_current() -> None:
    """The script may name the device to torch as well, but no other one.

    Raises:
        SMPError: it has named another one.
    """
    if is_host(_home):
        return
    current = torch.accelerator.current_device_index()
    if current != _home.index:
        kind = _home.type
        raise SMPError(
            f"the script has set torch's current device to {kind}:{current} (torch.{kind}.set_device, for "
            f"example), and this rank's is {_home}: leave the call out, or set {DEVICE_VARIABLE} to the "
            "device that is meant"
        )


def is_host(device: torch.device) -> bool:
    """Whether the processor reads the device's memory: MPI and files may have it as it is."""
    return device.type == CPU.type


def module(device: torch.device) -> Any:
    """What torch offers for the device: ``torch.cuda``, for example."""
    return torch.get_device_module(device)


def physical(device: torch.device) -> str:
    """Tells the device itself from every other one, whatever its number is: who says the same shares it."""
    properties = getattr(module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return f"{device} of {socket.gethostname()}" if uuid is None else f"{device.type} {uuid}"


def here(kind: str) -> torch.device:
    """This process's device of a type that another rank has named."""
    return _home if kind == _home.type else torch.device(kind)


def autocast_types() -> tuple[str, str]:
    """Types of devices whose autocast a step may be under: the CPU's, and this process's.

    On the CPU the second is what ``torch.is_autocast_enabled()`` speaks of where it is given no type.
    """
    return CPU.type, "cuda" if is_host(_home) else _home.type


# Random numbers ---------------------------------------------------------------------------------------------


class _Stream:
    """The device's random stream, with the methods of ``torch.Generator`` that tell and set its state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get_state(self) -> torch.Tensor:
        found: torch.Tensor = module(self._device).get_rng_state(self._device)
        return found

    def set_state(self, state: torch.Tensor) -> None:
        module(self._device).set_rng_state(state, self._device)


_streams: dict[torch.device, _Stream] = {}


def generators() -> list[Any]:
    """The default generators of this process: the CPU's, and the device's."""
    if is_host(_home):
        return [torch.default_generator]
    if _home not in _streams:
        _streams[_home] = _Stream(_home)
    return [torch.default_generator, _streams[_home]]


# Memory of the host -----------------------------------------------------------------------------------------


def host_memory(num_bytes: int) -> torch.Tensor:
    """A row of bytes that this process's device copies to and from by itself, where it can."""
    if is_host(_home):
        return torch.empty(num_bytes, dtype=torch.uint8, device=CPU)
    if _has_pinned.get(_home.type) is None:
        try:
            torch.empty(1, pin_memory=True, device=CPU)
            _has_pinned[_home.type] = True
        except RuntimeError:  # the kind of device has no allocator of its own for it
            _has_pinned[_home.type] = False
    if _has_pinned[_home.type]:
        return torch.empty(num_bytes, dtype=torch.uint8, device=CPU, pin_memory=True)
    row = torch.empty(num_bytes, dtype=torch.uint8, device=CPU)
    try:
        return row.pin_memory()
    except RuntimeError:
        return row


def current_stream() -> Any:
    """What this thread queues goes there; None: the device has none to choose from.

    The device is named to torch, which else looks for it each time: that takes as long as starting a kernel.
    """
    find = getattr(module(_home), "current_stream", None)
    return None if find is None else find(_home)


def record(event: Any) -> None:
    """The event is where the device's current stream is now."""
    stream = current_stream()
    event.record() if stream is None else event.record(stream)


def event() -> Event | None:
    """The place where the device's current stream is now; None: it has none, and all is done at once."""
    make = None if is_host(_home) else getattr(module(_home), "Event", None)
    if make is None:
        return None
    made: Any = make()
    record(made)
    return made  # type: ignore[no-any-return]


def on_home(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on this process's device; the same object if it is there."""
    if tensor.device == _home or is_host(_home):
        return tensor
    if is_host(tensor.device):
        with contextlib.suppress(RuntimeError):  # of a kind of device that pins nothing
            # The script may write to what it has pinned itself, before the device has copied it.
            tensor = (tensor.clone() if tensor.is_pinned() else tensor).pin_memory()
    return tensor.to(_home, non_blocking=True)


def memory_of_home() -> Memory | None:
    """Of this process's device; None: it does not say."""
    found = module(_home)
    try:
        total = found.get_device_properties(_home).total_memory
        return Memory(found.memory_allocated(_home), found.memory_reserved(_home), total)
    except AttributeError:
        return None


def timed_event() -> Any:
    """The place where the device's current stream is now, with the time when it comes there."""
    made = module(_home).Event(enable_timing=True)
    record(made)
    return made


def synchronize() -> None:
    """Waits until this process's device has done all that it was given."""
    if not is_host(_home):
        torch.accelerator.synchronize()


def chosen_here(local_rank: int, local_size: int) -> Choice:
    """By this process's environment."""
    return choose(os.environ, local_rank, local_size)
