"""The device as torch knows it: its name, its module, and what torch's Python backend leaves out."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import graphs, hook_errors, lateness, order, streams
from .as_torchs import take_over
from .kernels import register
from .memory import NAME, USE, Use, resize_storage
from .random_numbers import GENERATORS

COUNT_VARIABLE = "SMP_LITE_PRETENDED_DEVICES"
"""How many devices there are."""

OWN_VARIABLE = "SMP_LITE_PRETENDED_OWN"
"""Set: the devices of each process are its own, though they have the same numbers in all of them."""

_is_installed = False


class _Module:
    """``torch.pretended``, which says what ``torch.cuda`` says."""

    Stream, Event = streams.Stream, streams.Event
    CUDAGraph = graphs.Graph
    graph_pool_handle = staticmethod(object)

    def __init__(self) -> None:
        self._current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(os.environ.get(COUNT_VARIABLE, "1"))

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < self.device_count():
            raise RuntimeError("invalid device ordinal")
        self._current = index

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._current
        self.set_device(device)
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: Any = None) -> None:
        for index in range(self.device_count()):
            streams.synchronize(index)

    def current_stream(self, device: Any = None) -> streams.Stream:
        return streams.Stream.of(order.current(self._index(device)))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with contextlib.nullcontext() if stream is None else stream:
            yield

    def get_device_properties(self, device: Any = None) -> Any:
        """A device of one number is the same one for all processes, unless each is to have its own."""
        own = f" of process {os.getpid()}" if os.environ.get(OWN_VARIABLE) else ""
        return types.SimpleNamespace(uuid=f"{self._index(device)}{own}")

    # Memory -------------------------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        return USE.setdefault(self._index(device), Use()).now

    def max_memory_allocated(self, device: Any = None) -> int:
        return USE.setdefault(self._index(device), Use()).most

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        use = USE.setdefault(self._index(device), Use())
        use.most = use.now

    # Random numbers -----------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        GENERATORS[self._current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in GENERATORS:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return GENERATORS[self._index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        GENERATORS[self._index(device)].set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in GENERATORS]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(GENERATORS, states, strict=True):
            generator.set_state(state)

    def initial_seed(self) -> int:
        return GENERATORS[self._current].initial_seed()

    def _index(self, device: Any) -> int:
        if device is None:
            return self._current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self._current if index is None else index

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


MODULE = _Module()


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        hook_errors.put_aside()
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_keep: list[Any] = []  # torch holds no reference of its own


def is_installed() -> bool:
    """Whether this process has the device."""
    return _is_installed


def install() -> torch.device:
    """Gives this process the device; it stays until its end. Once is enough."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        hooks, guard = _Hooks(), _Guard()
        _keep.extend([hooks, guard])
        _setup_privateuseone_for_python_backend(NAME, MODULE, hooks, guard)
        take_over(__package__)
        register()
        hook_errors.install()
        for _ in range(max(MODULE.device_count(), 8)):
            GENERATORS.append(torch.Generator())
        MODULE.manual_seed_all(torch.initial_seed())
        _fill_gaps()
    return torch.device(NAME, MODULE.current_device())


def _fill_gaps() -> None:
    """What a backend in Python cannot tell torch 2.13: addresses, pinned memory, storages, indices."""
    address = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():
            if self.device.type == NAME:
                raise RuntimeError(f"the memory of a tensor on {self.device} cannot be read from the host")
            return address(self)

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
    torch._C._pretended_clearCublasWorkspaces = graphs.clear_workspaces  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lateness.pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lateness.is_pinned  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]
    # A parameter of the CPU cannot take in data of PrivateUse1, as it can of CUDA, and must stay the object.
    torch.__future__.set_swap_module_params_on_conversion(True)
    storage: Any = torch.storage
    move_others = storage._to

    def move(given: torch.UntypedStorage, device: torch.device, non_blocking: bool = False) -> Any:
        if given.device == device or NAME not in (given.device.type, device.type):
            return move_others(given, device, non_blocking)
        row = torch.empty(0, dtype=torch.uint8, device=given.device)
        row.set_(given, 0, (given.nbytes(),), (1,))  # type: ignore[call-overload]
        return row.to(device).untyped_storage()

    storage._to = move
    clone_others = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return clone_others(self)
        row = torch.empty(0, dtype=torch.uint8, device=self.device)
        row.set_(self, 0, (self.nbytes(),), (1,))  # type: ignore[call-overload]
        return row.clone().untyped_storage()

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]
    accelerator: Any = torch.accelerator
    accelerator.device_count = MODULE.device_count
    accelerator.current_device_index = MODULE.current_device
    accelerator.set_device_index = MODULE.set_device
    accelerator.synchronize = MODULE.synchronize
