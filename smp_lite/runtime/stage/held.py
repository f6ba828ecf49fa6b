"""What a stage holds in memory at some moment: for the error that says that there was not enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...devices import memory_of_home
from ...plan.units import human_bytes
from .microbatch import MicrobatchState

__all__ = ["what_is_held"]


def what_is_held(parameters: Iterable[torch.Tensor], states: Mapping[int, MicrobatchState]) -> str:
    """A table, a line for each kind of memory.

    Args:
        parameters: of the process.
        states: the stage's microbatches.
    """
    parameters = list(parameters)
    flying = [state for state in states.values() if state.leaves or state.data]
    values = [tensor for state in flying for tensor in state.data.values()]
    values += [leaf for state in flying for leaves in state.leaves.values() for leaf in leaves.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    known = _num_bytes([*parameters, *gradients, *values])
    rows = [
        ("parameters", human_bytes(_num_bytes(parameters))),
        ("their gradients", human_bytes(_num_bytes(gradients))),
        (f"values between segments, of {len(flying)} microbatches", human_bytes(_num_bytes(values))),
    ]
    memory = memory_of_home()
    if memory is not None:
        rest = max(0, memory.allocated - known)
        rows += [
            ("activations, optimizer state and all else", human_bytes(rest)),
            ("allocated in all", f"{human_bytes(memory.allocated)} of {human_bytes(memory.total)}"),
            ("kept by torch, and not in use", human_bytes(max(0, memory.reserved - memory.allocated))),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["what it held:", *(f"  {name:<{width}}  {size}" for name, size in rows)])


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory of these, each counted once; what is described only has none."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta" and type(tensor) in _PLAIN:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


_PLAIN = (torch.Tensor, torch.nn.Parameter)
