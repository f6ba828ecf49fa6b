"""Parameters and buffers go to the device, one after another, and stay the same objects.

So an optimizer that was made before, tied modules and lists keep what they hold, and no more than one
parameter is on both sides at a time: the device never holds more than what was moved, and the largest of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .away import is_away
from .tables import plain_parameters, plain_table

__all__ = ["moved", "whole_on"]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The object itself with its data, and its gradient, on the device; another one if it cannot be changed.

    Args:
        tensor: a parameter or buffer with memory.
        device: where it goes.
    """
    if tensor.device == device:
        return tensor
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        data = tensor.detach().to(device)
        gradient = None if tensor.grad is None else tensor.grad.to(device)
        if torch._has_compatible_shallow_copy_type(tensor, data):
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
            return tensor
        return _exchanged(tensor, data, gradient)


def _exchanged(tensor: torch.Tensor, data: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Where torch cannot give a tensor the data of another kind of device: two tensors change places."""
    is_parameter = isinstance(tensor, nn.Parameter)
    other: Any = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
    other.requires_grad_(tensor.requires_grad)
    other.grad = gradient
    other.__dict__.update(tensor.__dict__)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, name):
            setattr(other, name, getattr(tensor, name))
    if type(other) is not type(tensor):
        other.__class__ = type(tensor)
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError:  # somebody has weak references to it, or a graph over it
        return other  # type: ignore[no-any-return]
    return tensor


@contextlib.contextmanager
def whole_on(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: the whole model is on the device, for a run of it there; afterwards where it was."""
    before = {(id(table), name): tensor.device for table, name, tensor in _places(root)}
    if all(home == device for home in before.values()):
        yield
        return
    for table, name, tensor in _places(root):
        table[name] = moved(tensor, device)
    try:
        yield
    finally:
        for table, name, tensor in _places(root):
            table[name] = moved(tensor, before.get((id(table), name), device))


def _places(root: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    return [
        (table, name, tensor)
        for module in root.modules()
        for table in (plain_parameters(module), plain_table(module._buffers))
        for name, tensor in table.items()
        if tensor is not None and not is_away(tensor) and not tensor.is_meta
    ]
