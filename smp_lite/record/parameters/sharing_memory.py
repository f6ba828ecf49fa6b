"""Tensors that share memory with the model's parameters when it is cut.

In one process a state dict of the plain module, ``p.data`` or a row of a weight follow the training, since
they are the parameter's own memory. The partition frees the memory of other stages' parameters, and gives
sharded ones other memory. So such tensors of other stages become away, as their parameters do, and those of
parameters that have other memory now refuse by name to be used. A frozen parameter does not change, and what
shares its memory (the vectors of ``nn.Embedding.from_pretrained``) stays as it is.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...deferred import is_deferred
from ...devices import home
from ...errors import SMPError
from ..values.memory import is_shared, storage_of
from ..values.torch_functions import METADATA_FUNCTIONS, function_name
from .away import away_buffer, away_parameter, is_away
from .placement import Placement

__all__ = ["SharingMemory", "asks_for_form", "left_name", "refuse_parted"]

_OF_NUMBERS = frozenset(["data", "grad", "_grad", "T", "mT", "H", "mH", "real", "imag"])


@dataclass(frozen=True)
class _Range:
    """Where a parameter lies."""

    name: str
    start: int
    end: int


def refuse_parted(placement: Placement, own_memory: Collection[str]) -> None:
    """
    Args:
        placement: of a model that is about to be cut.
        own_memory: names of parameters that will have memory of their own, or are stepped in it.

    Raises:
        SMPError: two parameters share memory, and one would no longer follow the other.
    """
    for places in _ranges(placement).values():
        for one, other in itertools.combinations(places, 2):
            stages = [placement.parameter_stage[each.name] for each in (one, other)]
            if _overlap(one, other) and (
                stages[0] != stages[1] or one.name in own_memory or other.name in own_memory
            ):
                why = f"lie on stages {stages[0]} and {stages[1]}"
                if stages[0] == stages[1]:
                    why = "be sharded, or stepped as masters or in pieces, each by itself"
                raise SMPError(
                    f"the parameters {one.name!r} and {other.name!r} share memory without being one "
                    f"parameter (one was given the other's .data), and would {why}, so that one no longer "
                    "follows the other: tie them as one object before smp.DistributedModel "
                    "(first.weight = second.weight)"
                )


class SharingMemory:
    """Of a model that is about to be cut.

    Args:
        placement: of it.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._ranges = _ranges(placement)
        self._own = [(name, placement.parameter(name)) for name in placement.parameter_stage]
        self._found = list(self._others({id(parameter) for _, parameter in self._own}))

    def _others(self, own: set[int]) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Tensors that are no parameters of the model, each with the names of those in whose memory it is."""
        for tensor in gc.get_objects():
            if type(tensor) not in (torch.Tensor, nn.Parameter) or id(tensor) in own:
                continue
            if tensor.is_meta or tensor.device.type != home().type or (memory := storage_of(tensor)) is None:
                continue  # of one that goes to a device, in one process too, nothing follows
            if memory in self._ranges and tensor.numel():
                place = _Range("", *_extent(tensor))
                if names := [each.name for each in self._ranges[memory] if _overlap(place, each)]:
                    yield tensor, names

    def part(self) -> None:
        """The model has been cut: whoever no longer shares memory with a parameter is marked."""
        with torch._C.DisableTorchFunction():
            for name, parameter in self._own:
                # Somebody has weak references to the object, or a graph over it: another one is in the model.
                if type(parameter) is nn.Parameter and self._placement.parameter(name) is not parameter:
                    parameter.smp_left = name  # type: ignore[attr-defined]
                    parameter.__class__ = _LeftParameter
            for tensor, names in self._found:
                parameters = [self._placement.parameter(name) for name in names]
                stages = {p.smp_stage for p in parameters if is_away(p)}
                memory = storage_of(tensor)
                if (
                    len(stages) == 1
                    and all(map(is_away, parameters))
                    and _send_away(tensor, *stages, names[0])
                ):
                    continue
                if stages or any(storage_of(parameter) != memory for parameter in parameters):
                    tensor.smp_left = names[0]  # type: ignore[attr-defined]
                    tensor.__class__ = _LeftParameter if type(tensor) is nn.Parameter else _LeftTensor
        self._own.clear()
        self._found.clear()


def _ranges(placement: Placement) -> dict[int, list[_Range]]:
    """By memory, where parameters that train lie in it."""
    found: dict[int, list[_Range]] = {}
    for name in placement.parameter_stage:
        parameter = placement.parameter(name)
        if not parameter.requires_grad or is_deferred(parameter) or parameter.is_meta:
            continue
        if (memory := storage_of(parameter)) is not None and parameter.numel():
            found.setdefault(memory, []).append(_Range(name, *_extent(parameter)))
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory that are its own, from the first to the last."""
    with torch._C.DisableTorchFunction():
        reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        return start, start + (reach + 1) * tensor.element_size()


def _overlap(one: _Range, other: _Range) -> bool:
    return one.start < other.end and other.start < one.end


def _send_away(tensor: torch.Tensor, stage: int, name: str) -> bool:
    """Makes the object itself an away tensor; False: it cannot be, or numpy would be left without memory."""
    if is_shared(tensor):
        return False
    make = away_parameter if isinstance(tensor, nn.Parameter) else away_buffer
    try:
        torch.utils.swap_tensors(tensor, make(tensor, stage, f"what shares memory with {name}"))
    except RuntimeError:  # somebody has weak references to it, or a graph over it
        return False
    return True


def asks_for_form(func: Any) -> bool:
    """Whether a torch function of one tensor asks for no number of it, such as its shape."""
    called = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return called in METADATA_FUNCTIONS or (called == "__get__" and attribute not in _OF_NUMBERS)


def left_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of the parameter or buffer that a tensor among the arguments was, and no longer follows."""
    flat = [e for a in (*args, *kwargs.values()) for e in (a if isinstance(a, list | tuple) else [a])]
    return next((name for each in flat if (name := getattr(each, "smp_left", None)) is not None), "")


def _refuse(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if asks_for_form(func):
            return func(*args, **(kwargs or {}))
    name = left_name(args, kwargs or {})
    if getattr(func, "__name__", "") in ("__repr__", "__format__"):
        return f"<a tensor that shared memory with the parameter {name!r} until the model was cut>"
    raise SMPError(
        f"{function_name(func)} of a tensor that shared memory with the parameter {name!r} (a state dict of "
        "the plain module, .data, a view, made before the first step), and would follow its training in one "
        "process: here the parameter has other memory since the model was cut. Take it after the first step "
        "(model.state_dict() is the whole state), or a copy if the numbers of then are meant "
        "(clone(), copy.deepcopy)"
    )


class _LeftTensor(torch.Tensor):
    __torch_function__ = classmethod(_refuse)


class _LeftParameter(nn.Parameter):
    __torch_function__ = classmethod(_refuse)
