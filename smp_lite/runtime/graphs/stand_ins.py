"""Others in the place of a stage's parameters, while a graph is captured.

Autograd keeps a node for each parameter, and runs it on the stream that was current when the node was made. A
capture must not wait for another stream, and what runs later must not find itself on that of the capture. So
a capture has parameters of its own, with nodes of their own, in the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...record.parameters.placement import Placement
from ...record.parameters.tables import plain_parameters
from ...record.state.flat_weights import renew_lists

__all__ = ["stand_ins"]


@contextlib.contextmanager
def stand_ins(placement: Placement, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Within: whatever module holds one of the parameters has its stand-in there; gives them in order."""
    others: list[Tensor] = [nn.Parameter(parameter.detach()) for parameter in parameters]
    holders: dict[int, nn.Module] = {}
    places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for parameter, other in zip(parameters, others, strict=True):
        other.__dict__.update(parameter.__dict__)
        full = placement.alias(parameter)
        for holder in placement.holders(full) if full is not None else ():
            table = plain_parameters(holder)
            places += [(table, own, parameter, other) for own, held in table.items() if held is parameter]
            holders[id(holder)] = holder
    try:
        for table, own, _, other in places:
            table[own] = other
        for holder in holders.values():
            renew_lists(holder)
        yield others
    finally:
        for table, own, parameter, _ in places:
            table[own] = parameter
        for holder in holders.values():
            renew_lists(holder)
