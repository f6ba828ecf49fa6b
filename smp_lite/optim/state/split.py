"""Optimizer state of parameters that are split over the ranks of a stage.

What has the shape of the parameter's part is a part as well (moments, momenta), and a single number (a count
of steps) is the same for all parts. Anything else, such as the row and column averages of a factored
optimizer, says something of the whole tensor, which no part of it can give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import SMPError
from ...nn.layout import ParameterLayout, layout_of, part_of, whole_of

__all__ = ["piece_of_state", "state_part", "whole_state"]


def whole_state(parameter: torch.Tensor, state: Any) -> Any:
    """The state of the whole parameter, from that of its parts; collective over the axes that split it.

    Raises:
        SMPError: an entry is neither like the parameter's part nor one number.
    """
    layout = layout_of(parameter)
    if layout is None:
        return state
    return _mapped(state, layout.local_shape, lambda value: whole_of(value, layout))


def state_part(parameter: torch.Tensor, state: Any) -> Any:
    """This rank's part of the state of a whole parameter.

    Raises:
        SMPError: an entry is neither like the whole parameter nor one number.
    """
    layout = layout_of(parameter)
    if layout is None:
        return state
    return _mapped(state, layout.shape, lambda value: part_of(value, layout))


def piece_of_state(parameter: torch.Tensor, state: Any) -> Any:
    """This rank's piece of the state of a parameter that was whole on its stage, and is sharded now."""
    layout = layout_of(parameter)
    assert layout is not None
    own = ParameterLayout(layout.part_shape, ((),) * len(layout.part_shape), flat=layout.flat)
    return _mapped(state, own.shape, lambda value: part_of(value, own))


def _mapped(
    state: Any, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise SMPError(
            f"the optimizer keeps a {type(state).__name__} for a parameter that is split over ranks, which "
            "cannot be put together: use an optimizer of torch.optim"
        )
    found = {}
    for key in sorted(state, key=str):  # in one order on all ranks
        value = state[key]
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dim() > 0:
            found[key] = change(value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            raise SMPError(
                f"the optimizer's state {key!r} of shape {list(value.shape)} belongs to a parameter of shape "
                f"{list(shape)} that is split over ranks, and is not split like it, so it cannot be put "
                "together: use an optimizer that treats every element by itself, as Adam and SGD do"
            )
        else:
            found[key] = value
    return {key: found[key] for key in state}
