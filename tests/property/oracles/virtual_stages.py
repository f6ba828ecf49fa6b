"""Several pieces of a line on each stage, by weighing the whole split anew for every move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb

from smp_lite.plan.partitioning.balance import Line, Score, Slot, score, seatings, spread
from smp_lite.plan.partitioning.line_split import best_split, smallest_bound
from smp_lite.plan.partitioning.virtual_stages import runs_of, step_cost

_FEW_SPLITS = 1_000
_FEW_RUNS = 16

_Key = tuple[int, ...]


def balance_pieces(line: Line, num_stages: int, pieces: Sequence[int]) -> tuple[tuple[int, ...], Score]:
    """The stage of each atom, and the score. With fewer atoms than runs the last runs are missing."""
    runs = runs_of(pieces)
    found: list[tuple[tuple[int, ...], tuple[int, ...], Score]] = []
    for slots in seatings(line, may_stay=True):
        split = _Split(slots, _together(line, slots), runs[: len(slots)], num_stages)
        starts = split.best()
        if split.num_apart(starts):
            continue
        of_slots = split.stages(starts)
        stages = spread(slots, of_slots, len(line.costs))
        _, largest, cut_bytes, squares = score(line, stages, num_stages)
        missing = len(runs) - len(split.runs)
        piece = split.largest_piece(starts)
        key = missing, step_cost(num_stages, largest, piece), cut_bytes, squares
        found.append((key, stages, (missing, largest, piece, cut_bytes, squares)))
    _, stages, best_score = min(found, key=lambda scored: scored[0])
    return stages, best_score


def _together(line: Line, slots: Sequence[Slot]) -> list[list[int]]:
    """Slots that have to be on one stage though each has a place of its own."""
    slot_of = {atom: index for index, slot in enumerate(slots) for atom in slot.atoms}
    sets = ({slot_of[atom] for atom in group.atoms} for group in line.groups)
    return [sorted(places) for places in sets if len(places) > 1]


class _Split:
    """One line of slots and the runs to cut it into; `starts` are the first slots of the runs."""

    def __init__(
        self,
        slots: Sequence[Slot],
        together: list[list[int]],
        runs: list[tuple[int, int]],
        num_stages: int,
    ) -> None:
        self.ends = [0, *accumulate(slot.cost for slot in slots)]
        self.entry_bytes = [slot.entry_bytes for slot in slots]
        self.together = together
        self.runs = runs
        self.num_stages = num_stages

    def best(self) -> list[int]:
        num_slots = len(self.entry_bytes)
        if comb(num_slots - 1, len(self.runs) - 1) <= _FEW_SPLITS:
            splits = ([0, *cuts] for cuts in combinations(range(1, num_slots), len(self.runs) - 1))
            return min(splits, key=self._key)
        first = self._first()
        # Two ways down; either may end where the other goes on.
        ends = [self._improved(start, self._key) for start in (first, self._improved(first, self._even))]
        return min(ends, key=self._key)

    def stages(self, starts: Sequence[int]) -> list[int]:
        """Of each slot."""
        found: list[int] = []
        for (stage, _), (start, end) in zip(self.runs, pairwise([*starts, len(self.entry_bytes)])):
            found += [stage] * (end - start)
        return found

    def num_apart(self, starts: Sequence[int]) -> int:
        """How many groups are not on one stage."""
        if not self.together:
            return 0
        stages = self.stages(starts)
        return sum(len({stages[place] for place in places}) > 1 for places in self.together)

    def largest_piece(self, starts: Sequence[int]) -> int:
        return max(self._pieces(starts))

    def _first(self) -> list[int]:
        """The split with the smallest largest piece, a run of n counted as n where that can be."""
        sizes = [size for _, size in self.runs]
        if sum(sizes) > len(self.entry_bytes):
            sizes = [1] * len(sizes)
        bound = smallest_bound(self.ends, sum(sizes))
        starts = best_split(self.ends, self.entry_bytes, sum(sizes), bound)
        return [starts[place] for place in accumulate(sizes[:-1], initial=0)]

    def _improved(self, starts: list[int], key: Callable[[Sequence[int]], _Key]) -> list[int]:
        """Takes the best of the moves, as long as one makes the key smaller; where none does and there are
        few runs, of those with one more step between neighbours.
        """
        present = key(starts)
        while True:
            trials = [t for move in self._moves(starts) if (t := self._moved(starts, *move))]
            best = min(trials, key=key, default=starts)
            if key(best) >= present and len(self.runs) <= _FEW_RUNS:
                steps = list(self._steps())
                trials = [t for trial in trials for step in steps if (t := self._moved(trial, *step))]
                best = min(trials, key=key, default=starts)
            smaller = key(best)
            if smaller >= present:
                return starts
            starts, present = best, smaller

    def _moved(self, starts: Sequence[int], source: int, target: int) -> list[int] | None:
        """One slot less in the source, one more in the target; None where a run would be empty."""
        moved = list(starts)
        if source < target:
            for run in range(source + 1, target + 1):
                moved[run] -= 1
        else:
            for run in range(target + 1, source + 1):
                moved[run] += 1
        ends = [*moved[1:], len(self.entry_bytes)]
        return moved if ends[source] > moved[source] and moved[source] >= 0 else None

    def _moves(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """From the runs of the largest stage, or the largest piece, to any other; and every step between
        neighbours, which may cut fewer bytes."""
        loads, pieces = self._loads(starts), self._pieces(starts)
        stage, piece = loads.index(max(loads)), pieces.index(max(pieces))
        sources = dict.fromkeys([run for run, (own, _) in enumerate(self.runs) if own == stage] + [piece])
        for source in sources:
            yield from ((source, target) for target in range(len(self.runs)) if target != source)
        yield from self._steps()

    def _steps(self) -> Iterator[tuple[int, int]]:
        for run in range(len(self.runs) - 1):
            yield from ((run, run + 1), (run + 1, run))

    def _even(self, starts: Sequence[int]) -> _Key:
        loads = self._loads(starts)
        return self.num_apart(starts), max(loads), sum(load**2 for load in loads)

    def _key(self, starts: Sequence[int]) -> _Key:
        loads = self._loads(starts)
        cut_bytes = sum(self.entry_bytes[start] for start in starts[1:])
        squares = sum(load**2 for load in loads)
        cost = step_cost(self.num_stages, max(loads), self.largest_piece(starts))
        return self.num_apart(starts), cost, cut_bytes, squares

    def _costs(self, starts: Sequence[int]) -> list[int]:
        ends = [self.ends[start] for start in starts]
        return [end - start for start, end in pairwise([*ends, self.ends[-1]])]

    def _pieces(self, starts: Sequence[int]) -> list[int]:
        """The cost of a piece of each run, rounded up."""
        return [-(-cost // size) for cost, (_, size) in zip(self._costs(starts), self.runs)]

    def _loads(self, starts: Sequence[int]) -> list[int]:
        loads = [0] * self.num_stages
        for cost, (stage, _) in zip(self._costs(starts), self.runs):
            loads[stage] += cost
        return loads
