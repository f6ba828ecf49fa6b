"""What a script gives to a step, or to the model, goes to the device: data comes from the CPU.

A tensor that is there already stays the same object, and so does everything where the device is the CPU. One
object in several places stays one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ...devices import home, is_host, on_home
from .microbatch import like
from .placed import PlacedTensor
from .structure import flatten, rebuild

__all__ = ["inputs_here"]

_T = TypeVar("_T")


def inputs_here(value: _T) -> _T:
    """The same with tensors of the CPU, wherever they are nested, on this process's device."""
    if is_host(home()):
        return value
    return _here(value, {})  # type: ignore[no-any-return]


def _here(value: Any, moved: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, Mapping) and (type(value) is dict or not isinstance(value, dict)):
        found = {key: _here(item, moved) for key, item in value.items()}
        return found if type(value) is dict else like(value, found)
    if type(value) in (list, tuple):
        return type(value)([_here(item, moved) for item in value])
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    if not any(_is_data(leaf) for leaf in leaves):
        return value
    for place, leaf in enumerate(leaves):
        if _is_data(leaf):
            if id(leaf) not in moved:
                moved[id(leaf)] = leaf, on_home(leaf)
            leaves[place] = moved[id(leaf)][1]
    return rebuild(spec, iter(leaves))


def _is_data(leaf: Any) -> bool:
    """Parameters and results of earlier steps are the library's own."""
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, nn.Parameter | PlacedTensor)
        and is_host(leaf.device)
    )
