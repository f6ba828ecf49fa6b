"""Counts the bytes of the tensors that are alive, while torch functions run on fake ones.

Every operator's result is seen below autograd, saved tensors included, and its memory counted once, however
many views it has, from then until nobody holds it. torch's own tracker for fully sharded models
(``torch.distributed._tools.mem_tracker``) watches storages in the same way.

What kernels allocate themselves does not show, since fake tensors have no kernels. Two cases are large enough
to be known by name, both as torch 2.13 has them on the CPU: oneDNN's convolutions work on copies of their
operands in a blocked layout, and the means and sums of some losses lie in memory as large as their input.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import is_host
from ..code.operators import run_operator

__all__ = ["LiveBytes"]

_aten = torch.ops.aten
_REDUCED_TWICE = (_aten.mse_loss, _aten.smooth_l1_loss)
_LOSSES_IN_LARGE_MEMORY = (*_REDUCED_TWICE, _aten.binary_cross_entropy, _aten.soft_margin_loss)


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts; on top of a ``FakeTensorMode`` it counts without computing.

    Args:
        ignored: tensors whose memory is not counted (parameters, the batch).

    Attributes:
        alive: bytes of the memory of all results that somebody holds.
        peak: the most that ``alive`` has been; may be set back.
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._ignored: list[torch.UntypedStorage] = []
        self._known: dict[int, Any] = {}
        self.ignore(ignored)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Their memory is not counted from here on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._ignored.append(storage)  # kept alive, or its address would be used again
            self._known[storage._cdata] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = run_operator(func, types, args, kwargs or {})
        at_least = 0
        if func._overloadpacket in _LOSSES_IN_LARGE_MEMORY:
            at_least = _num_bytes(args[0])
        self._note(result, at_least)
        self.peak = max(self.peak, self.alive + _scratch_bytes(func, args, result))
        return result

    def _note(self, result: Any, at_least: int) -> None:
        if isinstance(result, tuple | list):
            for part in result:
                self._note(part, at_least)
        elif isinstance(result, torch.Tensor) and result.layout is torch.strided:
            storage = result.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                num_bytes = max(storage.nbytes(), at_least)
                self._known[key] = weakref.ref(storage, functools.partial(self._freed, key, num_bytes))
                self.alive += num_bytes

    def _freed(self, key: int, num_bytes: int, _: Any) -> None:
        del self._known[key]
        self.alive -= num_bytes


def _scratch_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """What the kernel has beside its arguments and results, where that is much."""
    packet = func._overloadpacket
    if packet in _REDUCED_TWICE:
        return _num_bytes(args[0])
    if packet is _aten.convolution:
        data, weight = args[:2]
        return max(_num_bytes(data) + _num_bytes(weight), _num_bytes(result)) if _blocked(data, weight) else 0
    if packet is _aten.convolution_backward:
        gradient, data, weight = args[:3]
        copies = max(_num_bytes(gradient) + _num_bytes(data), _num_bytes(weight))
        return copies if _blocked(data, weight) else 0
    return 0


def _blocked(data: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN copies the operands; it need not where the kernel has one element."""
    on_cpu = is_host(data.device) and torch.backends.mkldnn.is_available()
    return on_cpu and any(length > 1 for length in weight.shape[2:])


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
