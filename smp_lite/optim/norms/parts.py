"""One call of a norm function, put together from what each rank has of it.

torch takes the norm of every tensor and then the norm of those norms, so the norms of single tensors are all
that has to travel; in the order in which one process would have stacked them, the result is the same to the
bit. What one process would have been given is told from what the ranks were given:

- all name the same tensors, those of other stages included (``model.parameters()``): that list;
- only one rank names any that count: that rank's list;
- each names all that it has (``model.local_parameters()``, gradients collected by hand), or all that it has
  of the same optimizer groups: their union, in the model's order or the optimizer's.

Anything else could also be a loop over local tensors, which runs on each rank for itself, so it is refused.
(A round of such a loop that gives everything a rank has is taken for the whole.) No processes here, and
tensors have become numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...errors import SMPMismatch

__all__ = ["FOREIGN", "Norm", "Part", "as_in_one_process", "of_stage"]

FOREIGN = -1
"""The number of a tensor that is not the model's; every rank has it."""


class Norm(NamedTuple):
    """The norm of one tensor; ``kind`` is the dtype of the tensor, ``dtype`` that of its norm."""

    value: float
    kind: torch.dtype
    dtype: torch.dtype


class Part(NamedTuple):
    """What one rank has of a call.

    Attributes:
        named: number of each tensor that it was given, in order.
        norms: by position in ``named``, of those that count and live here.
        of_parts: positions of those that are norms of a part of the tensor; each part is in one rank's.
        is_single: it was given one tensor and no list.
        is_whole: the norms are of all that this rank has.
        groups: the optimizer groups of which it has named all that this rank has, if there is nothing else
            in it; else empty.
        populated: the optimizer groups of which this rank has anything.
    """

    named: tuple[int, ...]
    norms: dict[int, Norm]
    of_parts: frozenset[int]
    is_single: bool
    is_whole: bool
    groups: frozenset[int]
    populated: frozenset[int]

    def sequence(self) -> list[tuple[int, Norm]]:
        return [(self.named[position], norm) for position, norm in sorted(self.norms.items())]

    def own(self) -> list[int]:
        """Numbers of the model's tensors that count here, in order."""
        return [number for number, _ in self.sequence() if number != FOREIGN]


def as_in_one_process(
    what: str,
    parts: Sequence[Part],
    orders: Sequence[Sequence[int]],
    describe: Callable[[int, Sequence[int]], str],
) -> list[Norm]:
    """The norms in the order of one process that holds the whole model.

    Args:
        what: names the call in errors.
        parts: of all ranks.
        orders: numbers in the model's order, and then in the optimizer's, if there is one.
        describe: what the rank at that position in ``parts`` was given, from its numbers.

    Raises:
        SMPMismatch: the ranks were given different things, or have different gradients of a tensor that is
            not the model's.
    """
    if all(part.named == parts[0].named for part in parts):
        return _by_position(what, parts)
    foreign = _foreign(what, parts)
    givers = [i for i, part in enumerate(parts) if part.own()]
    if len(givers) < 2:
        sequence = parts[givers[0]].sequence() if givers else []
        if any(number == FOREIGN for number, _ in sequence):
            return [norm for _, norm in sequence]
        return [*(norm for _, norm in sequence), *foreign]
    if not any(part.is_single for part in parts):
        by_groups = _same_groups(parts, givers)
        if by_groups or all(part.is_whole for part in parts):
            candidates = list(reversed(orders)) if by_groups else list(orders)
            union = _in_order([parts[i] for i in givers], candidates)
            first = all(parts[i].sequence()[0][0] == FOREIGN for i in givers)
            return [*foreign, *union] if first else [*union, *foreign]
    one, other = givers[:2]
    raise SMPMismatch(
        f"{what}: {describe(one, parts[one].own())}, {describe(other, parts[other].own())}. "
        "Give the same list on every rank, as from model.parameters(): parameters of other stages have no "
        "gradient here and count all the same. Or give everything that a rank has: model.local_parameters()"
    )


def of_stage(what: str, parts: Sequence[Part], norm_type: float) -> Part:
    """What the ranks of one stage have, as one rank would have it that holds all of the stage.

    Raises:
        SMPMismatch: they were given different things.
    """
    first = parts[0]
    if any(part.named != first.named for part in parts):
        raise SMPMismatch(
            f"{what}: the ranks that share a stage were given different tensors: give all the same"
        )
    norms = {}
    for position in sorted({position for part in parts for position in part.norms}):
        here = [part.norms[position] for part in parts if position in part.norms]
        if any(position in part.of_parts for part in parts):
            value = _together([norm.value for norm in here], norm_type)
            norms[position] = here[0]._replace(value=value)
        elif position in first.norms:
            norms[position] = first.norms[position]
    return first._replace(norms=norms, of_parts=frozenset())


def _together(norms: Sequence[float], norm_type: float) -> float:
    """The norm of a tensor from those of its parts."""
    if norm_type == math.inf:
        return max(norms)
    if norm_type == 0:
        return sum(norms)
    return math.fsum(norm**norm_type for norm in norms) ** (1 / norm_type)


def _by_position(what: str, parts: Sequence[Part]) -> list[Norm]:
    found = []
    for position, number in enumerate(parts[0].named):
        here = [part.norms[position] for part in parts if position in part.norms]
        if number == FOREIGN:
            _check_foreign(what, here)
        found += here[:1]
    return found


def _foreign(what: str, parts: Sequence[Part]) -> list[Norm]:
    """Norms of what is not the model's: the same on all ranks that have them, counted once."""
    lists = [[norm for number, norm in part.sequence() if number == FOREIGN] for part in parts]
    longest = max(lists, key=len)
    for found in lists:
        for pair in zip(found, longest):
            _check_foreign(what, pair)
    return longest


def _check_foreign(what: str, norms: Sequence[Norm]) -> None:
    if len({repr(norm) for norm in norms}) > 1:  # by text: NaN is the same as NaN
        raise SMPMismatch(
            f"{what}: a tensor that is not the model's has norm {norms[0].value} on one rank and "
            f"{norms[-1].value} on another: it must be the same on all ranks of the mp group"
        )


def _same_groups(parts: Sequence[Part], givers: Sequence[int]) -> bool:
    groups = parts[givers[0]].groups
    return bool(groups) and all(
        part.groups == groups if i in givers else not part.populated & groups for i, part in enumerate(parts)
    )


def _in_order(parts: Sequence[Part], orders: Sequence[Sequence[int]]) -> list[Norm]:
    """The union in the first order that no rank's own list contradicts."""
    for order in [*orders, orders[0]]:
        places = {number: place for place, number in enumerate(order)}
        sequences = [[places.get(number, len(places)) for number in part.own()] for part in parts]
        if all(sequence == sorted(sequence) for sequence in sequences):
            break
    entries = [(places[n], norm) for part in parts for n, norm in part.sequence() if n != FOREIGN]
    return [norm for _, norm in sorted(entries, key=lambda entry: entry[0])]
