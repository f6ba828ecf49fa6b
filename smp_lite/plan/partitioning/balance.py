"""The number problem inside the partitioner: put a line of atoms on stages.

An atom is whatever the caller does not want cut; here it is a cost and the bytes that a cut in
front of it would send. Costs are integers, so that equal is equal: every rank finds the same
answer, and communication really decides between equally balanced ones. Better means, in this order:
fewer empty stages, a smaller largest stage, fewer bytes cut, a smaller sum of squared stage costs.

Contiguous: the smallest possible largest stage is found by bisection (the classical linear
partition problem: is there a split with no part above this bound?), then a dynamic programme picks,
among all splits within that bound, the one with the fewest bytes and the least squares
(`line_split`). Both are exact. SMP's own scheme (its paper's d'Hondt allocation of devices to
segments) is not used: a single huge module can win several seats there that it then cannot share out.

Atoms that have to be together take one seat in the line, that of one of them; each possible seat is
tried. Not contiguous: exact search over the line for a few atoms; for more, moves and swaps that
start from the contiguous answer, so that what need not be torn apart stays adjacent.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from .line_split import best_split, smallest_bound
from .local_search import Scattered

__all__ = ["Group", "Line", "Score", "Slot", "balance", "score", "seatings", "spread"]

_MAX_SEATINGS = 64
_EXACT_SLOTS = 12
_MAX_STATES = 20_000
_MOST_STEPS = 16  # of local search, for each stage: the first ones gain most, and each tears the line

Score = tuple[int, ...]
"""Empty stages, cost of the largest, bytes cut, sum of squared stage costs; less is better."""


@dataclass(frozen=True)
class Group:
    """Atoms (indices) that have to be on one stage, and those whose seat they may take."""

    atoms: tuple[int, ...]
    seats: tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """Atoms in execution order. The groups are disjoint."""

    costs: tuple[int, ...]
    entry_bytes: tuple[int, ...]
    groups: tuple[Group, ...] = ()


class Slot(NamedTuple):
    """Atoms that move as one, at the seat of one of them."""

    atoms: tuple[int, ...]
    seat: int
    cost: int
    entry_bytes: int


def balance(line: Line, num_stages: int, *, contiguous: bool = True) -> tuple[int, ...]:
    """The stage of each atom, the first atom's being 0 unless its group sits elsewhere.

    With `contiguous=False` the stages need not be intervals of the line, but only where that makes
    the largest stage smaller.
    """
    bounds: list[int] = []
    for slots in seatings(line):
        num_parts = min(num_stages, len(slots))
        bounds.append(smallest_bound([0, *accumulate(slot.cost for slot in slots)], num_parts))
    # The largest stage decides first: where it is larger, nothing else need be known of a seating.
    splits = (
        spread(slots, _cut(slots, num_parts, bound), len(line.costs))
        for slots, bound in zip(seatings(line), bounds, strict=True)
        if bound == min(bounds)
    )
    best = min(splits, key=lambda stages: score(line, stages, num_stages))
    if contiguous:
        return best
    scattered = _scatter(line, best, num_stages)
    better = score(line, scattered, num_stages)[:2] < score(line, best, num_stages)[:2]
    return scattered if better else best


def score(line: Line, stages: Sequence[int], num_stages: int) -> Score:
    loads = _loads(line.costs, stages, num_stages)
    cut_bytes = sum(
        line.entry_bytes[atom] for atom in range(1, len(stages)) if stages[atom] != stages[atom - 1]
    )
    return num_stages - len(set(stages)), max(loads), cut_bytes, sum(load**2 for load in loads)


def seatings(line: Line, *, may_stay: bool = False) -> Iterator[list[Slot]]:
    """Every way to seat the groups. Where there are too many, the lightest groups keep to their
    first seat. With `may_stay` the atoms of a group may also stay where they are.
    """
    options: list[tuple[int | None, ...]] = []
    groups = sorted(line.groups, key=lambda g: -sum(line.costs[atom] for atom in g.atoms))
    num_seatings = 1
    for group in groups:
        seats = (None, *group.seats) if may_stay else group.seats
        fits = num_seatings * len(seats) <= _MAX_SEATINGS
        options.append(seats if fits else group.seats[:1])
        num_seatings *= len(options[-1])
    grouped = {atom for group in groups for atom in group.atoms}
    alone = [
        Slot((atom,), atom, cost, size) for atom, (cost, size) in enumerate(zip(line.costs, line.entry_bytes))
    ]
    singles = [slot for slot in alone if slot.seat not in grouped]
    costs = [sum(line.costs[atom] for atom in group.atoms) for group in groups]
    for seats in product(*options):
        slots = singles.copy()
        for group, seat, cost in zip(groups, seats, costs):
            if seat is None:
                for atom in group.atoms:
                    insort(slots, alone[atom], key=_seat)
            else:
                insort(slots, Slot(group.atoms, seat, cost, line.entry_bytes[seat]), key=_seat)
        yield slots


def _seat(slot: Slot) -> int:
    return slot.seat


def _cut(slots: Sequence[Slot], num_parts: int, bound: int) -> list[int]:
    """The best contiguous split: the stage of each slot."""
    ends = [0, *accumulate(slot.cost for slot in slots)]
    starts = best_split(ends, [slot.entry_bytes for slot in slots], num_parts, bound)
    stages: list[int] = []
    for part, (start, end) in enumerate(pairwise([*starts, len(slots)])):
        stages += [part] * (end - start)
    return stages


def _scatter(line: Line, stages: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The best assignment found when stages need not be intervals, given the contiguous one.
    Stages are numbered by first use, so that the first atom is on stage 0.
    """
    slots = next(seatings(line))
    if not _can_shrink(slots, _loads(line.costs, stages, num_stages)):
        return tuple(stages)
    found: Sequence[int] | None = None
    if len(slots) <= _EXACT_SLOTS:
        found = _search(slots, num_stages, bound=score(line, stages, num_stages)[1] - 1)
    if found is None:
        found = _descend(line, slots, [stages[slot.atoms[0]] for slot in slots], num_stages)
    scattered = spread(slots, found, len(line.costs))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(stage, len(numbers)) for stage in scattered)


def _search(slots: Sequence[Slot], num_stages: int, *, bound: int) -> tuple[int, ...] | None:
    """Exact: all assignments that keep every stage within `bound`, slot by slot. Two partial ones
    with the same loads and the same load of the last slot's stage have the same future, so only the
    one with fewer bytes cut is kept. None where there is no assignment, or too many to follow.
    """
    num_used = min(num_stages, len(slots))
    # (bytes cut, stage of each slot so far, loads of the stages in use)
    frontier: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(0, (), ())]
    for index, slot in enumerate(slots):
        best: dict[tuple[int, ...], tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        for cut_bytes, stages, loads in frontier:
            for stage in range(min(len(loads) + 1, num_used)):
                padded = [*loads, 0] if stage == len(loads) else [*loads]
                padded[stage] += slot.cost
                unused = num_used - len(padded)
                if padded[stage] > bound or unused > len(slots) - index - 1:
                    continue
                moved = slot.entry_bytes if stages and stage != stages[-1] else 0
                others = sorted(padded[:stage] + padded[stage + 1 :])
                longer = (cut_bytes + moved, (*stages, stage), tuple(padded))
                future = (padded[stage], *others)
                best[future] = min(best.get(future, longer), longer)
        frontier = list(best.values())
        if not 0 < len(frontier) <= _MAX_STATES:
            return None
    _, stages, _ = min(frontier, key=lambda f: (max(f[2]), f[0], sum(load**2 for load in f[2])))
    return stages


def _descend(line: Line, slots: Sequence[Slot], start: Sequence[int], num_stages: int) -> list[int]:
    """Local search: move a slot off the largest stage, or swap it with another, while that lowers
    the larger of the two stages.
    """
    search = Scattered(
        [slot.atoms for slot in slots], [slot.cost for slot in slots], line.entry_bytes, start, num_stages
    )
    for _ in range(min(4 * len(slots), _MOST_STEPS * num_stages)):
        if not search.step():
            break
    return search.stages


def _loads(costs: Sequence[int], stages: Sequence[int], num_stages: int) -> list[int]:
    loads = [0] * num_stages
    for cost, stage in zip(costs, stages):
        loads[stage] += cost
    return loads


def _can_shrink(slots: Sequence[Slot], loads: Sequence[int]) -> bool:
    return max(loads) > max(max(slot.cost for slot in slots), -(-sum(loads) // len(loads)))


def spread(slots: Sequence[Slot], slot_stages: Sequence[int], num_atoms: int) -> tuple[int, ...]:
    stages = [0] * num_atoms
    for slot, stage in zip(slots, slot_stages):
        for atom in slot.atoms:
            stages[atom] = stage
    return tuple(stages)
