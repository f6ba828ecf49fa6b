"""Changes that cannot stand together: shared weights that would be split in two ways, sums of sums."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import SMPError
from ..layout import layout_of
from ..one_d import RowParallelLinear
from .changes import Change, Changes
from .modules import SummandModule, SummedOutput

__all__ = ["check_conflicts"]


def check_conflicts(changes: Changes) -> None:
    """
    Raises:
        SMPError: weights are shared with what is not split alike; a module of summands has something that
            every rank would add.
    """
    names = {id(module): name for name, module in reversed(changes.modules.items())}
    for change in changes.found.values():
        if change.kind is SummandModule:
            _check_summands(changes, change, names)
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for module in changes.model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                holders.setdefault(id(tensor), []).append((module, name))
                if not tensor.is_meta and tensor.numel():
                    place = f"{names[id(module)]}.{name}"
                    memory.setdefault(_address(tensor), []).append((place, tensor))
    for change in changes.found.values():
        for name, layout in change.layouts.items():
            parameter = change.module._parameters[name]
            if parameter is None:
                continue
            place = f"{names[id(change.module)]}.{name}"
            if layout_of(parameter) is not None:
                raise SMPError(f"plan: {place} is split already: parallelize works on a whole model")
            for module, other in holders[id(parameter)]:
                found = changes.found.get(id(module))
                theirs = None if found is None else found.layouts.get(other)
                if theirs != layout:
                    how = "is not in the plan" if theirs is None else "is split in another way"
                    raise SMPError(
                        f"plan: {place} ({change.entry.pattern!r}: {change.entry.style!r}) is the same "
                        f"parameter as {names[id(module)]}.{other}, which {how}: split both alike (an "
                        "embedding 'embedding_rowwise', a head 'colwise_gather_output'), or none"
                    )
            if not parameter.is_meta and parameter.numel():
                for other_place, tensor in memory[_address(parameter)]:
                    if tensor is not parameter:
                        raise SMPError(
                            f"plan: {place} shares memory with {other_place}, which a part of it would not"
                        )


def _check_summands(changes: Changes, change: Change, names: dict[int, str]) -> None:
    inside = names[id(change.module)]
    for module in change.module.modules():
        found = changes.found.get(id(module))
        if (
            found is not None
            and found.kind in (RowParallelLinear, SummedOutput)
            and module is not change.module
        ):
            raise SMPError(
                f"plan: {names[id(module)]} sums over the ranks, and {inside} around it does so again"
            )
        for name, _ in module.named_parameters(recurse=False):
            layout = None if found is None else found.layouts.get(name)
            if layout is None or not layout.axes:
                raise SMPError(
                    f"plan: {inside} is {change.entry.style!r}, but its parameter "
                    f"{names[id(module)]}.{name} is whole on every rank: what it contributes would be "
                    f"added once by each. Split it too, or leave {inside} out"
                )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else id(tensor)
