"""Scripts that speak of CUDA, on machines without: ``smp-lite run --cuda-as-cpu``.

SMP v1 ran on GPUs only, so its scripts call ``torch.cuda.set_device(smp.local_rank())`` and
``torch.cuda.synchronize()`` without asking, and end with a ValueError where ``torch.cuda.is_available()`` is
False. With the switch on, functions of ``torch.cuda`` do nothing, its counters say 0, and "cuda", wherever a
torch function is given a device, means the CPU. It is off unless asked for: a script that looks for a GPU and
finds none should say so.

What it cannot do: ``torch.autocast("cuda")`` has no effect on CPU tensors, as in torch itself; kernels and
extensions for CUDA are still missing.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["is_on", "means_cpu", "turn_on"]

_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_mode: _CudaAsCPU | None = None
_device = 0


def is_on() -> bool:
    """Whether "cuda" means the CPU in this process."""
    return _mode is not None


def turn_on() -> None:
    """From now on, in this process, "cuda" means the CPU. Does nothing where there is a GPU."""
    global _mode
    if _mode is not None:
        return
    if torch.cuda.is_available():
        warnings.warn("there is a GPU, so it is used and --cuda-as-cpu has no effect", stacklevel=2)
        return
    # A script of torch 1 cannot write weights_only=False, and reads what it has pickled itself.
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for name, function in _functions().items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, function)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returns(None))
    torch.cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    fork_rng = torch.random.fork_rng
    torch.random.fork_rng = lambda devices=None, enabled=True, **_: fork_rng([], enabled)
    _replace_load()
    _replace_module_methods()
    _mode = _CudaAsCPU()
    _mode.__enter__()


def means_cpu(device: torch.device) -> bool:
    """Whether the device is the CPU under this switch."""
    return is_on() and device.type == "cuda"


class _CudaAsCPU(TorchFunctionMode):
    """Turns CUDA devices among the arguments of torch functions into the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return torch.device("cpu") if _names_a_gpu(*args, **kwargs) else func(*args, **kwargs)
        if any(_is_cuda(arg) for arg in args) or any(_is_cuda(value) for value in kwargs.values()):
            args = tuple(map(_on_cpu, args))
            kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _names_a_gpu(device: Any = "cuda", index: int | None = None, **kwargs: Any) -> bool:
    """Of the arguments of ``torch.device``: a number alone is a GPU's."""
    device = kwargs.get("type", device)
    return type(device) is int or _is_cuda(device)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith(("cuda:", "torch.cuda.")))


def _on_cpu(value: Any) -> Any:
    if not _is_cuda(value):
        return value
    if isinstance(value, str) and value.startswith("torch."):
        return value.replace("torch.cuda.", "torch.")  # the name of a type of tensors
    return torch.device("cpu") if isinstance(value, torch.device) else "cpu"


def _replace_load() -> None:
    """What was saved from a GPU is loaded all the same."""
    original = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or type(map_location) is int or isinstance(map_location, dict):
            map_location = "cpu"
        return original(f, _on_cpu(map_location), *args, **kwargs)

    torch.load = load


def _replace_module_methods() -> None:
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple("cpu" if type(arg) is int else _on_cpu(arg) for arg in args)
        kwargs = {name: "cpu" if type(v) is int else _on_cpu(v) for name, v in kwargs.items()}
        return original(module, *args, **kwargs)

    def cuda(module: nn.Module, device: Any = None) -> nn.Module:
        return module

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    nn.Module.cuda = cuda  # type: ignore[method-assign, assignment]


# What takes the place of functions of torch.cuda ------------------------------------------------------------


class _Event:
    """Times by the clock: what was issued before has run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return (end._time_s - self._time_s) * 1e3

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(contextlib.nullcontext[None]):
    """A stream of which everything has run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        event = event if event is not None else _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


def _set_device(device: Any) -> None:
    global _device
    if isinstance(device, str | torch.device):
        device = torch.device(device).index or 0
    _device = int(device)


def _count() -> int:
    return int(os.environ.get(_LOCAL_SIZE, "1"))


def _returns(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: torch's compiler has one rule for each function."""
    return lambda *args, **kwargs: value


def _functions() -> dict[str, Callable[..., Any]]:
    counters = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
        max_memory_cached utilization"""
    silent = """synchronize empty_cache manual_seed manual_seed_all seed seed_all init ipc_collect
        reset_peak_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated
        reset_max_memory_cached set_rng_state set_rng_state_all set_per_process_memory_fraction
        set_stream"""
    properties = types.SimpleNamespace(name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=0)
    no_state = torch.empty(0, dtype=torch.uint8)
    return {
        **{name: _returns(0) for name in f"{counters} initial_seed".split()},
        **{name: _returns(None) for name in silent.split()},
        **{name: _returns(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        "device_count": _count,
        "current_device": lambda: _device,
        "set_device": _set_device,
        "device": lambda device=None: _Stream(),
        "get_device_name": _returns("CPU"),
        "get_device_capability": _returns((0, 0)),
        "get_device_properties": _returns(properties),
        "mem_get_info": _returns((0, 0)),
        "memory_stats": lambda *args, **kwargs: {},
        "memory_summary": _returns(""),
        "get_rng_state": lambda *args, **kwargs: no_state.clone(),
        "get_rng_state_all": lambda: [no_state.clone() for _ in range(_count())],
        "Event": _Event,
        "Stream": _Stream,
        "stream": lambda stream=None: _Stream(),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
    }
