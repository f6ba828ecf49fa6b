"""The lists that torch's recurrent layers keep of their own parameters.

``nn.RNNBase`` has a list of them, and one of weak references to them, by which its forward notices that they
have been exchanged; then it makes both anew, which is a change of attributes. So whoever puts other tensors
into the table of its parameters, for a moment or for good, puts lists of those beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...deferred import is_deferred

__all__ = ["SECOND_LISTS", "lists_of", "renew_lists"]

SECOND_LISTS = frozenset(("_flat_weights", "_flat_weight_refs"))


def lists_of(module: nn.Module, parameters: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Attributes of the module that name its parameters a second time, for this table; mostly none."""
    namespace = module.__dict__
    if not isinstance(namespace.get("_flat_weights"), list):
        return {}
    weights = [parameters.get(name) for name in namespace["_flat_weights_names"]]
    found: dict[str, list[Any]] = {"_flat_weights": weights}
    if "_flat_weight_refs" in namespace:  # not in torch 2.0
        # What waits to be made cannot be referred to weakly: it changes places with what is made.
        found["_flat_weight_refs"] = [
            None if w is None or is_deferred(w) else weakref.ref(w) for w in weights
        ]
    return found


def renew_lists(module: nn.Module) -> None:
    """The table of the module's parameters has changed."""
    namespace = module.__dict__
    if "_flat_weights" in namespace:
        namespace.update(lists_of(module, namespace["_parameters"]))
