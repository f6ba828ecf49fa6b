"""Balancing by a dynamic programme over all windows, and a local search that weighs every swap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from smp_lite.plan.partitioning.balance import Line, Score

_MAX_SEATINGS = 64
_EXACT_SLOTS = 12
_MAX_STATES = 20_000


@dataclass(frozen=True)
class _Slot:
    """Atoms that move as one, at the seat of one of them."""

    atoms: tuple[int, ...]
    cost: int
    entry_bytes: int


def balance(line: Line, num_stages: int, *, contiguous: bool = True) -> tuple[int, ...]:
    """The stage of each atom, the first atom's being 0 unless its group sits elsewhere.

    With `contiguous=False` the stages need not be intervals of the line, but only where that makes
    the largest stage smaller.
    """
    splits = (_spread(slots, _cut(slots, num_stages), len(line.costs)) for slots in _seatings(line))
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


def _seatings(line: Line) -> Iterator[list[_Slot]]:
    """Every way to seat the groups. Where there are too many, the lightest groups keep to their
    first seat.
    """
    options: list[tuple[int, ...]] = []
    groups = sorted(line.groups, key=lambda g: -sum(line.costs[atom] for atom in g.atoms))
    num_seatings = 1
    for group in groups:
        fits = num_seatings * len(group.seats) <= _MAX_SEATINGS
        options.append(group.seats if fits else group.seats[:1])
        num_seatings *= len(options[-1])
    grouped = {atom for group in groups for atom in group.atoms}
    for seats in product(*options):
        atoms_at = {atom: (atom,) for atom in range(len(line.costs)) if atom not in grouped}
        atoms_at.update((seat, group.atoms) for seat, group in zip(seats, groups))
        yield [
            _Slot(atoms, sum(line.costs[atom] for atom in atoms), line.entry_bytes[seat])
            for seat, atoms in sorted(atoms_at.items())
        ]


def _cut(slots: Sequence[_Slot], num_stages: int) -> list[int]:
    """The best contiguous split: the stage of each slot."""
    num_parts = min(num_stages, len(slots))
    ends = [0, *accumulate(slot.cost for slot in slots)]
    bound = _smallest_bound(ends, num_parts)
    # best[end]: (bytes cut, squares, start of the last part), over splits of slots[:end] into the
    # number of parts reached so far.
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
    starts: list[dict[int, int]] = []
    for part in range(1, num_parts + 1):
        longer: dict[int, tuple[int, int, int]] = {}
        for end in range(part, len(slots) - num_parts + part + 1):
            for start in range(end - 1, part - 2, -1):
                load = ends[end] - ends[start]
                if load > bound:
                    break
                if start in best:
                    cut_bytes = best[start][0] + (slots[start].entry_bytes if start else 0)
                    candidate = (cut_bytes, best[start][1] + load**2, start)
                    longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
        starts.append({end: start for end, (_, _, start) in best.items()})
    stages = [0] * len(slots)
    end = len(slots)
    for part in reversed(range(num_parts)):
        start = starts[part][end]
        stages[start:end] = [part] * (end - start)
        end = start
    return stages


def _smallest_bound(ends: Sequence[int], num_parts: int) -> int:
    """The smallest largest part of any split into at most `num_parts` contiguous parts, for the
    running totals `ends` (0 first).
    """
    low = -(-ends[-1] // num_parts)
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        start = 0
        for _ in range(num_parts):
            start = bisect_right(ends, ends[start] + middle) - 1
        low, high = (low, middle) if start == len(ends) - 1 else (middle + 1, high)
    return high


def _scatter(line: Line, stages: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The best assignment found when stages need not be intervals, given the contiguous one.
    Stages are numbered by first use, so that the first atom is on stage 0.
    """
    slots = next(_seatings(line))
    if not _can_shrink(slots, _loads(line.costs, stages, num_stages)):
        return tuple(stages)
    found: Sequence[int] | None = None
    if len(slots) <= _EXACT_SLOTS:
        found = _search(slots, num_stages, bound=score(line, stages, num_stages)[1] - 1)
    if found is None:
        found = _descend(line, slots, [stages[slot.atoms[0]] for slot in slots], num_stages)
    scattered = _spread(slots, found, len(line.costs))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(stage, len(numbers)) for stage in scattered)


def _search(slots: Sequence[_Slot], num_stages: int, *, bound: int) -> tuple[int, ...] | None:
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


def _descend(line: Line, slots: Sequence[_Slot], start: Sequence[int], num_stages: int) -> list[int]:
    """Local search: move a slot off the largest stage, or swap it with another, while that lowers
    the larger of the two stages; among equally good steps the one with the fewest bytes cut.
    """
    stages = list(start)
    for _ in range(4 * len(slots)):
        steps = list(_steps(slots, stages, num_stages))
        if not steps:
            break
        smallest = min(peak for peak, _ in steps)
        trials = []
        for changes in (changes for peak, changes in steps if peak == smallest):
            trial = list(stages)
            for slot, stage in changes:
                trial[slot] = stage
            trials.append(trial)
        stages = min(trials, key=lambda t: score(line, _spread(slots, t, len(line.costs)), num_stages)[2])
    return stages


def _steps(
    slots: Sequence[_Slot], stages: Sequence[int], num_stages: int
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Every move and swap that relieves the largest stage and empties none: the larger load of the
    two stages afterwards, and the changes as (slot, new stage).
    """
    loads = _loads([slot.cost for slot in slots], stages, num_stages)
    largest = loads.index(max(loads))
    mine = [slot for slot, stage in enumerate(stages) if stage == largest]
    for slot in mine:
        cost = slots[slot].cost
        for stage in range(num_stages):
            peak = max(loads[largest] - cost, loads[stage] + cost)
            if stage != largest and peak < loads[largest]:
                yield peak, ((slot, stage),)
        for other, stage in enumerate(stages):
            gain = cost - slots[other].cost
            peak = max(loads[largest] - gain, loads[stage] + gain)
            if stage != largest and peak < loads[largest]:
                yield peak, ((slot, stage), (other, largest))


def _loads(costs: Sequence[int], stages: Sequence[int], num_stages: int) -> list[int]:
    loads = [0] * num_stages
    for cost, stage in zip(costs, stages):
        loads[stage] += cost
    return loads


def _can_shrink(slots: Sequence[_Slot], loads: Sequence[int]) -> bool:
    return max(loads) > max(max(slot.cost for slot in slots), -(-sum(loads) // len(loads)))


def _spread(slots: Sequence[_Slot], slot_stages: Sequence[int], num_atoms: int) -> tuple[int, ...]:
    stages = [0] * num_atoms
    for slot, stage in zip(slots, slot_stages):
        for atom in slot.atoms:
            stages[atom] = stage
    return tuple(stages)
