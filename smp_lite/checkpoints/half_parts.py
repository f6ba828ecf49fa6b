"""The parts that hold an optimizer's state: in half precision there are two, as SMP has them.

``optimizer_...`` is what an optimizer over float32 parameters says of itself; ``fp16_states_...`` has those
parameters (the master weights) and the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optim.state.dicts import HALF_KEYS
from ..optim.state.own_parameters import PARTIAL_KEY
from ..storage.layout import FP16_STATES, OPTIMIZER

__all__ = ["joined", "parts_of_state"]


def parts_of_state(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What becomes of an optimizer's state dict, by part."""
    half = {key: value for key, value in state.items() if key in HALF_KEYS}
    rest = {key: value for key, value in state.items() if key not in HALF_KEYS}
    if not half:
        return {OPTIMIZER: rest}
    mark = {PARTIAL_KEY: state[PARTIAL_KEY]} if PARTIAL_KEY in state else {}
    return {OPTIMIZER: rest, FP16_STATES: {**half, **mark}}


def joined(contents: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state dict of which these are the parts; None: an optimizer was not saved, or not read."""
    state = contents.get(OPTIMIZER)
    if state is None or not isinstance(half := contents.get(FP16_STATES), dict):
        return state
    return {**state, **{key: value for key, value in half.items() if key in HALF_KEYS}}
