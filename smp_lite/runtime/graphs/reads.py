"""What the Python of a segment reads, which must be as it was when the graph was made.

The same that a replayed step takes as given of the model's own code, but of the modules that the segment
calls, whose code does not run again either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...devices import home
from ...record.code.reads import places_read
from ...record.code.watch import Names
from ...record.state.between import ReadBetween
from ...record.state.places import PLAIN

__all__ = ["Reads"]


class Reads:
    """What was there when this was made.

    Args:
        modules: that the segment calls.
        names: what their code mentions.
        tensors: parameters that it uses beside theirs.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Names, tensors: Sequence[torch.Tensor]) -> None:
        whole = nn.ModuleList(modules)
        self._parts = [part for part in whole.modules() if part is not whole]
        self._tensors = [*whole.parameters(), *whole.buffers(), *tensors]
        self._held = self._held_now()
        self._memory, self._storages = self._memory_now(), [t.untyped_storage() for t in self._tensors]
        self._places = places_read(whole, names)
        self._seen = self._places.look()
        self._objects = ReadBetween()
        self._objects.look(self._places)

    def have_changed(self) -> bool:
        """Whether a run of the Python could differ, or the memory of what it reads is another."""
        return (
            self._memory != self._memory_now()
            or not _alike(self._held, self._held_now())
            or self._places.look() is not self._seen
            or self._objects.changed() is not None
        )

    def _memory_now(self) -> list[Any]:
        return [
            (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.requires_grad)
            for t in self._tensors
        ] + list(_kernel_switches())

    def _held_now(self) -> list[Any]:
        found: list[Any] = []
        for part in self._parts:
            found.append(type(part))
            for key, value in part.__dict__.items():
                found.append(key)
                if isinstance(value, dict) and key.startswith("_"):  # parameters, buffers, parts, hooks
                    for entry in value.items():
                        found += entry
                else:
                    found.append(value)
        return found


def _kernel_switches() -> tuple[Any, ...]:
    """By which torch chooses kernels, beside those that a command carries."""
    return tuple(_told(switch) for switch in _SWITCHES)


def _told(switch: Callable[[], Any]) -> Any:
    try:
        return switch()
    except RuntimeError as error:  # torch tells it of one of its two ways to set precisions only
        return str(error)


def _precision(*names: str) -> Callable[[], Any]:
    return lambda: getattr(functools.reduce(_within, names, torch.backends), "fp32_precision", None)


def _precision_of_device() -> Any:
    return _precision(home().type, "matmul")()


def _within(found: Any, name: str) -> Any:
    return getattr(found, name, None)


_SWITCHES: tuple[Callable[[], Any], ...] = (
    torch.get_float32_matmul_precision,
    torch._C._get_cublas_allow_tf32,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    _precision(),
    _precision_of_device,
    _precision("cudnn", "conv"),
    _precision("cudnn", "rnn"),
)


def _alike(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
        for a, b in zip(old, new, strict=True)
    )
