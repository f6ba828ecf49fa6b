"""Several pieces of the model on each stage: which piece goes where, and where the line of atoms is cut.

With ``v`` pieces a stage the line goes round: stages 0..P-1, again 0..P-1 (the interleaved schedule of
Narayanan et al. 2021, arXiv 2104.04473). ``"v"`` is two pieces there and back: 0..P-1, P-1..0 (Qi et al.
2024, arXiv 2405.15362). There both ends of the model are on stage 0, so embeddings that are tied to the head
cost nothing: no gradient and no second visit. Neighbouring pieces of one stage, as in the middle of a V, are
one *run*: no cut is needed between them.

Better means, in this order: fewer runs missing; a shorter step; fewer bytes cut; a smaller sum of squared
stage costs. A step of M microbatches takes as long as the largest stage, M times, and the pipeline fills and
drains in P - 1 of the largest piece (Narayanan et al., section 2.2): unequal pieces lose what pieces are for.
It is weighed for M = 2 P, whatever M is. Costs of far pieces add up, so this is no linear partition
problem any more (with equal pieces it contains number partitioning). Few splits are all tried. Else the best
split into pieces (`line_split`), which is near already, is improved by passing single atoms on from the
largest stage, or piece, to another one: every cut between the two moves by one. It ends where no step helps;
once from there, and once from where the stages alone are most even.

Atoms that have to be together take one seat in the line, or stay where they are if the same stage comes by at
all these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, combinations, groupby, pairwise
from math import comb
from typing import Literal

from .balance import Line, Score, Slot, score, seatings, spread
from .line_split import best_split, smallest_bound
from .split_moves import Figures, Move, SplitLine, SplitState

__all__ = ["VirtualStages", "balance_pieces", "piece_stages", "runs_of", "step_cost"]

VirtualStages = int | Literal["v"]

_FEW_SPLITS = 1_000
_FEW_RUNS = 16

_Key = tuple[int, ...]
_KeyOf = Callable[[Figures], _Key]


def piece_stages(num_stages: int, virtual_stages: VirtualStages) -> tuple[int, ...]:
    """The stage of each piece of the line. Raises ValueError for what is no shape."""
    if virtual_stages == "v":
        return (*range(num_stages), *reversed(range(num_stages)))
    if isinstance(virtual_stages, bool) or not isinstance(virtual_stages, int) or virtual_stages < 1:
        raise ValueError(f"virtual_stages is {virtual_stages!r}; it has to be an int >= 1, or 'v'.")
    return tuple(range(num_stages)) * virtual_stages


def runs_of(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """(stage, number of pieces) of neighbouring pieces of one stage."""
    return [(stage, len(list(run))) for stage, run in groupby(pieces)]


def balance_pieces(line: Line, num_stages: int, pieces: Sequence[int]) -> tuple[tuple[int, ...], Score]:
    """The stage of each atom, and the score. With fewer atoms than runs the last runs are missing."""
    runs = runs_of(pieces)
    found: list[tuple[tuple[int, ...], tuple[int, ...], Score]] = []
    for slots in seatings(line, may_stay=True):
        split = _Split(slots, _together(line, slots), runs[: len(slots)], num_stages)
        starts = split.best()
        figures = split.figures(starts)
        if figures.num_apart:
            continue
        of_slots = split.stages(starts)
        stages = spread(slots, of_slots, len(line.costs))
        _, largest, cut_bytes, squares = score(line, stages, num_stages)
        missing = len(runs) - len(split.runs)
        key = missing, step_cost(num_stages, largest, figures.piece), cut_bytes, squares
        found.append((key, stages, (missing, largest, figures.piece, cut_bytes, squares)))
    _, stages, best_score = min(found, key=lambda scored: scored[0])
    return stages, best_score


def step_cost(num_stages: int, largest_stage: int, largest_piece: int) -> int:
    """What a step of 2 P microbatches takes, of which one takes these."""
    return 2 * num_stages * largest_stage + (num_stages - 1) * largest_piece


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
        self.runs = runs
        self.num_stages = num_stages
        self.line = SplitLine(self.ends, self.entry_bytes, together, runs, num_stages)

    def best(self) -> list[int]:
        num_slots = len(self.entry_bytes)
        if comb(num_slots - 1, len(self.runs) - 1) <= _FEW_SPLITS:
            splits = ([0, *cuts] for cuts in combinations(range(1, num_slots), len(self.runs) - 1))
            return min(splits, key=lambda starts: self._key(self.figures(starts)))
        first = self._first()
        # Two ways down; either may end where the other goes on.
        ends = [self._improved(start, self._key) for start in (first, self._improved(first, _even))]
        return min(ends, key=lambda starts: self._key(self.figures(starts)))

    def stages(self, starts: Sequence[int]) -> list[int]:
        """Of each slot."""
        found: list[int] = []
        for (stage, _), (start, end) in zip(self.runs, pairwise([*starts, len(self.entry_bytes)])):
            found += [stage] * (end - start)
        return found

    def _first(self) -> list[int]:
        """The split with the smallest largest piece, a run of n counted as n where that can be."""
        sizes = [size for _, size in self.runs]
        if sum(sizes) > len(self.entry_bytes):
            sizes = [1] * len(sizes)
        bound = smallest_bound(self.ends, sum(sizes))
        starts = best_split(self.ends, self.entry_bytes, sum(sizes), bound)
        return [starts[place] for place in accumulate(sizes[:-1], initial=0)]

    def _improved(self, starts: list[int], key: _KeyOf) -> list[int]:
        """Takes the best of the moves, as long as one makes the key smaller; where none does and there are
        few runs, of those with one more step between neighbours.
        """
        present = key(self.figures(starts))
        while True:
            state = self._state(starts)
            best = _best(state.moves(), key)
            if best is not None and best[0] < present:
                present = best[0]
                starts = state.moved(*best[1])
                continue
            if len(self.runs) > _FEW_RUNS:
                return starts
            found = starts
            for move in dict.fromkeys(move for move, _ in state.moves()):
                further = self._state(state.moved(*move))
                best = _best(further.steps(), key)
                if best is not None and best[0] < present:
                    present = best[0]
                    found = further.moved(*best[1])
            if found is starts:
                return starts
            starts = found

    def figures(self, starts: Sequence[int]) -> Figures:
        return self._state(starts).figures

    def _state(self, starts: Sequence[int]) -> SplitState:
        return SplitState(starts, self.line)

    def _key(self, figures: Figures) -> _Key:
        cost = step_cost(self.num_stages, figures.largest, figures.piece)
        return figures.num_apart, cost, figures.cut_bytes, figures.squares


def _even(figures: Figures) -> _Key:
    return figures.num_apart, figures.largest, figures.squares


def _best(moves: Iterable[tuple[Move, Figures]], key: _KeyOf) -> tuple[_Key, Move] | None:
    """The first of the moves that leave the smallest key."""
    best: tuple[_Key, Move] | None = None
    for move, figures in moves:
        found = key(figures)
        if best is None or found < best[0]:
            best = found, move
    return best
