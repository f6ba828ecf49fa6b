"""State dicts of models with split parameters: whole tensors under the original names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from ..keeping import note_wholes
from ..layout import layout_of, part_of, whole_of

__all__ = ["load_whole_state_dict", "whole_state_dict"]


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` of the dense model; collective over the axes that split it.

    Names, shapes and ties are those of the dense model: names of one parameter hold one tensor.
    """
    found: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layout = layout_of(value) if isinstance(value, torch.Tensor) else None
        if layout is not None:
            if id(value) not in found:
                found[id(value)] = whole_of(value, layout)
            state[name] = found[id(value)]
        else:
            state[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return state


def load_whole_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads the dense model's state dict; each rank takes its parts.

    Raises:
        SMPError: names are missing, or nobody knows them, or a shape is another one.
    """
    own = model.state_dict(keep_vars=True)
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise SMPError(f"state dict of {type(model).__name__}: missing {missing}, unknown {unknown}")
    parts = {}
    for name, value in state.items():
        layout = layout_of(own[name]) if isinstance(own[name], torch.Tensor) else None
        try:
            parts[name] = value if layout is None else part_of(value, layout)
        except ValueError as error:
            raise SMPError(f"state dict of {type(model).__name__}: {name}: {error}") from error
    try:
        model.load_state_dict(parts)
    except RuntimeError as error:
        raise SMPError(str(error)) from error
    note_wholes(model, state)
