"""Deferred tensors become real ones: the same objects, wherever they are held.

A parameter keeps its identity (optimizers, lists, tied modules), its hooks and what a script has set on it.
All tensors that lie in one memory get it together.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from .dispatch import DeferredTensor, is_deferred, script_attributes
from .log import Memory
from .replay import make, plainly

__all__ = ["Waiting", "has_deferred"]


def has_deferred(root: nn.Module) -> bool:
    """Whether any parameter or buffer of a model has no memory yet."""
    return any(map(is_deferred, _state(root)))


def _state(root: nn.Module) -> list[torch.Tensor]:
    tables = [table for module in root.modules() for table in (module._parameters, module._buffers)]
    return [tensor for table in tables for tensor in table.values() if tensor is not None]


class Waiting:
    """All deferred tensors of this process, of which those of one model are about to be made.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        gc.collect()  # or tensors that only a circle holds would be made
        self._in_memory: dict[Memory, list[DeferredTensor]] = {}
        for found in gc.get_objects():
            if type(found) is DeferredTensor:
                self._in_memory.setdefault(found.smp_memory, []).append(found)
        self._buffers = {id(buffer) for buffer in root.buffers()}
        self._names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
        self._of_parameters = {p.smp_memory for p in root.parameters() if is_deferred(p)}  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raises SMPError if a parameter's object could not become a real one."""
        for memory in self._of_parameters:
            for tensor in self._in_memory.get(memory, ()):
                if isinstance(tensor, nn.Parameter) and id(tensor) in self._names:
                    _check_free(tensor, f"the parameter {self._names[id(tensor)]!r}")

    def make_others(self) -> None:
        """Makes what is no parameter: buffers, and tensors that modules or scripts have kept."""
        buffers = {id(b): b for b in self.root.buffers() if is_deferred(b)}
        for memory in [m for m in self._in_memory if m not in self._of_parameters]:
            self._make_all_in(memory)
        for buffer in buffers.values():
            if is_deferred(buffer):  # it lies in a parameter's memory, which other ranks may have
                self._become(buffer, buffer.smp_value())

    def make(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes these parameters, one memory at a time."""
        for parameter in parameters:
            if is_deferred(parameter):
                self._make_all_in(parameter.smp_memory)  # type: ignore[attr-defined]

    def _make_all_in(self, memory: Memory) -> None:
        (storage,) = make([memory])
        for tensor in self._in_memory.pop(memory, ()):
            if not is_deferred(tensor) or tensor.smp_memory is not memory:
                continue
            if tensor.requires_grad and not tensor.is_leaf:
                continue  # of a graph of its own; whoever uses it makes it
            mine = isinstance(tensor, nn.Parameter) or id(tensor) in self._buffers
            if not mine and tensor._use_count() > 1:  # type: ignore[attr-defined]
                continue  # it cannot become another one, but makes itself where it is used
            with plainly():
                real = tensor.smp_place.tensor(storage)
            self._become(tensor, real)

    def _become(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        try:
            _become(tensor, value)
        except RuntimeError as error:  # of torch, which counts who refers to it
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            name = self._names.get(id(tensor))
            what = f"a tensor of shape {list(value.shape)}" if name is None else f"the {kind} {name!r}"
            raise SMPError(
                f"{what}, whose initialization is delayed, cannot be made: a view of it or a weak reference "
                "to it is kept (another buffer that is a view of it, for example), which would go on meaning "
                "a tensor without memory. Keep a clone instead, or build that module without delay"
            ) from error

    def forget(self) -> None:
        """Nobody waits for the rest; its tensors make themselves where they are used."""
        for _, tensor in self.root.named_parameters():
            if not is_deferred(tensor):
                for key in ("smp_memory", "smp_twin", "smp_hold"):  # of those that went to another rank
                    tensor.__dict__.pop(key, None)
        self._in_memory.clear()


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """A deferred tensor is that real one from now on.

    Raises:
        RuntimeError: somebody refers to it in a way that torch cannot follow.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    with torch.no_grad():
        real: Any = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    if not is_parameter:
        real.requires_grad_(tensor.requires_grad)
    with torch._C._DisableTorchDispatch():
        real.grad = tensor.grad
        if tensor._backward_hooks:
            real._backward_hooks = tensor._backward_hooks
        if tensor._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            real._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        tensor.grad = None
    real.__dict__.update(script_attributes(tensor))
    torch.utils.swap_tensors(tensor, real)


def _check_free(tensor: torch.Tensor, what: str) -> None:
    held = "a weak reference to it" if weakref.getweakrefs(tensor) else ""
    if not held and tensor._use_count() > 2:  # type: ignore[attr-defined]
        held = (
            "a view of it, or a result of it that requires gradients (as torch.nn.utils.weight_norm does; "
            "torch.nn.utils.parametrizations.weight_norm does not)"
        )
    if held:
        raise SMPError(
            f"{what} is not initialized yet, and the script keeps {held}, which would go on meaning a tensor "
            "without memory: make it after the first step, or build the model without delay"
        )
