"""A split of a line into runs, and what it would be with one slot passed on from a run to another one.

All cuts between the two runs move by one slot. Passing on to one run further moves one cut more, so what a
move makes of the split is found from the move before it, in a time that does not grow with the runs: two of
them change their cost, and of the pieces' costs the largest is known before and behind the moved cuts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = ["Figures", "Move", "SplitLine", "SplitState"]

Move = tuple[int, int]
"""The run that has one slot less, and the one that has one more."""


class Figures(NamedTuple):
    """What is good or bad about a split.

    Attributes:
        num_apart: groups that are not on one stage.
        largest: cost of the largest stage.
        piece: cost of the largest piece, rounded up.
        cut_bytes: over all cuts.
        squares: sum of squared stage costs.
    """

    num_apart: int
    largest: int
    piece: int
    cut_bytes: int
    squares: int


class SplitLine(NamedTuple):
    """What is split.

    Attributes:
        ends: running totals of the slots' costs, 0 first.
        entry_bytes: of each slot, what a cut in front of it sends.
        together: slots that have to be on one stage.
        runs: of each its stage and its number of pieces.
        num_stages: of all.
    """

    ends: Sequence[int]
    entry_bytes: Sequence[int]
    together: Sequence[Sequence[int]]
    runs: Sequence[tuple[int, int]]
    num_stages: int


class SplitState:
    """One split; `starts` are the first slots of the runs."""

    def __init__(self, starts: Sequence[int], line: SplitLine) -> None:
        self.line, self.starts = line, starts
        ends = [line.ends[start] for start in starts]
        self.costs = [end - start for start, end in pairwise([*ends, line.ends[-1]])]
        self.pieces = [-(-cost // size) for cost, (_, size) in zip(self.costs, line.runs)]
        self.loads = [0] * line.num_stages
        for cost, (stage, _) in zip(self.costs, line.runs):
            self.loads[stage] += cost
        self.figures = Figures(
            self._num_apart(starts),
            max(self.loads),
            max(self.pieces),
            sum([line.entry_bytes[start] for start in starts[1:]]),
            sum([load * load for load in self.loads]),
        )
        # The largest of the pieces before each run, and of those from each run on.
        self._before = [0, *accumulate(self.pieces, max)]
        self._from = [*accumulate(reversed(self.pieces), max, initial=0)][::-1]

    def moved(self, source: int, target: int) -> list[int]:
        """The starts after a move."""
        moved = list(self.starts)
        if source < target:
            for run in range(source + 1, target + 1):
                moved[run] -= 1
        else:
            for run in range(target + 1, source + 1):
                moved[run] += 1
        return moved

    def moves(self) -> Iterator[tuple[Move, Figures]]:
        """From the runs of the largest stage, or the largest piece, to any other; and every step between
        neighbours, which may cut fewer bytes. No run gives its last slot away.
        """
        stage, piece = self.loads.index(self.figures.largest), self.pieces.index(self.figures.piece)
        mine = [run for run, (own, _) in enumerate(self.line.runs) if own == stage]
        for source in dict.fromkeys([*mine, piece]):
            if self._has_two(source):
                yield from reversed(list(self._passed_on(source, range(source - 1, -1, -1))))
                yield from self._passed_on(source, range(source + 1, len(self.starts)))
        yield from self.steps()

    def steps(self) -> Iterator[tuple[Move, Figures]]:
        """Every move between neighbours."""
        for run in range(len(self.starts) - 1):
            if self._has_two(run):
                yield from self._passed_on(run, range(run + 1, run + 2))
            if self._has_two(run + 1):
                yield from self._passed_on(run + 1, range(run, run - 1, -1))

    def _has_two(self, run: int) -> bool:
        end = self.starts[run + 1] if run + 1 < len(self.starts) else len(self.line.entry_bytes)
        return end - self.starts[run] > 1

    def _passed_on(self, source: int, targets: range) -> Iterator[tuple[Move, Figures]]:
        """Moves to one run after the other, away from the source."""
        ends, entry_bytes, together, runs, _ = self.line
        starts, costs = self.starts, self.costs
        before, behind = self._before, self._from
        num_apart, _, _, cut_bytes, squares = self.figures
        loads = self.loads.copy()
        moved = list(starts) if together else starts
        rightward = targets.step > 0
        step = 1 if rightward else -1
        # Beyond the source all is as it was; the runs passed by have their final cost.
        largest_piece = before[source] if rightward else behind[source + 1]
        own_stage, own_size = runs[source]
        own_cost = costs[source]
        for target in targets:
            cut = target if rightward else target + 1
            start = starts[cut]
            slot = start - 1 if rightward else start
            cost = ends[slot + 1] - ends[slot]
            cut_bytes += entry_bytes[start - step] - entry_bytes[start]
            stage, size = runs[target]
            if stage != own_stage:
                load, other = loads[own_stage], loads[stage]
                squares += 2 * cost * (other - load + cost)
                loads[own_stage] = load - cost
                loads[stage] = other + cost
            piece = -((cost - own_cost) // own_size)
            if piece > largest_piece:
                largest_piece = piece
            own_cost = costs[target] + cost
            piece = -(-own_cost // size)
            rest = behind[target + 1] if rightward else before[target]
            if together:
                moved[cut] = start - step
                num_apart = self._num_apart(moved)
            yield (
                (source, target),
                Figures(num_apart, max(loads), max(largest_piece, piece, rest), cut_bytes, squares),
            )
            own_stage, own_size = stage, size

    def _num_apart(self, starts: Sequence[int]) -> int:
        runs = self.line.runs
        return sum(
            len({runs[bisect_right(starts, place) - 1][0] for place in places}) > 1
            for places in self.line.together
        )
