"""Moves and swaps of slots between stages that need not be intervals of the line.

A step takes load off the largest stage: a slot of it goes to another stage, or changes places with a slot
there, so that the larger of the two stages gets as small as it can; among equally good steps the one with
the fewest bytes cut. Slots are looked up by their cost: for one of the largest stage, what fits best in its
place is found among the sorted costs of another stage, and a stage so full that no exchange with it could be
as good is not looked at. So a step takes a time near the number of slots in the largest stage, not the
product of that with all slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["Scattered"]

Changes = tuple[tuple[int, int], ...]
"""Slots, and the stages that they go to."""

_MOST_TIES = 200  # of equally good steps: of thousands of slots that cost the same, the first ones


class Scattered:
    """Slots on stages.

    Args:
        atoms: of each slot, its places in the line.
        costs: of each slot.
        entry_bytes: of each atom, what a cut in front of it sends.
        stages: of each slot; changed by every step.
    """

    def __init__(
        self,
        atoms: Sequence[Sequence[int]],
        costs: Sequence[int],
        entry_bytes: Sequence[int],
        stages: Sequence[int],
        num_stages: int,
    ) -> None:
        self.stages = list(stages)
        self._atoms, self._costs, self._entry_bytes = atoms, costs, entry_bytes
        self._loads = [0] * num_stages
        self._slots: list[dict[int, list[int]]] = [{} for _ in range(num_stages)]  # of each stage, by cost
        self._by_cost: list[list[int]] = [[] for _ in range(num_stages)]  # different costs, sorted
        self._stage_of = [0] * len(entry_bytes)  # of each atom
        for slot, stage in enumerate(stages):
            self._put(slot, stage)

    def step(self) -> bool:
        """Makes the best step; False where none takes load off the largest stage."""
        largest = self._loads.index(max(self._loads))
        others = sorted((load, stage) for stage, load in enumerate(self._loads) if stage != largest)
        peak = self._smallest_peak(largest, others)
        if peak >= self._loads[largest]:
            return False
        ties = islice(self._reaching(peak, largest, others), _MOST_TIES)
        for slot, stage in min(ties, key=self._order):
            self._take(slot)
            self._put(slot, stage)
        return True

    def _smallest_peak(self, largest: int, others: Iterable[tuple[int, int]]) -> int:
        """The larger of the two stages after the best step."""
        load = peak = self._loads[largest]
        for other_load, other in others:
            if -(-(load + other_load) // 2) > peak:
                break
            theirs = self._by_cost[other]
            for cost in self._by_cost[largest]:
                # What makes the two alike is a gain of half their difference; a move swaps with nothing.
                place = bisect_right(theirs, (2 * cost - load + other_load) // 2)
                for their_cost in (0, *theirs[max(place - 1, 0) : place + 1]):
                    gain = cost - their_cost
                    peak = min(peak, max(load - gain, other_load + gain))
        return peak

    def _reaching(self, peak: int, largest: int, others: Iterable[tuple[int, int]]) -> Iterator[Changes]:
        """All steps after which the larger of the two stages has this load."""
        load = self._loads[largest]
        for other_load, other in others:
            if -(-(load + other_load) // 2) > peak:
                break
            for gain in {load - peak, peak - other_load}:
                if max(load - gain, other_load + gain) != peak:
                    continue
                for cost in self._by_cost[largest]:
                    for slot in self._slots[largest][cost]:
                        if cost == gain:
                            yield ((slot, other),)
                        for their_slot in self._slots[other].get(cost - gain, ()):
                            yield ((slot, other), (their_slot, largest))

    def _order(self, changes: Changes) -> tuple[int, ...]:
        (slot, stage), *swapped = changes
        place = (0, stage) if not swapped else (1, swapped[0][0])
        return (self._more_bytes(changes), slot, *place)

    def _more_bytes(self, changes: Changes) -> int:
        """Bytes cut after the changes, less those before."""
        stage_of, num_atoms = self._stage_of, len(self._entry_bytes)
        new = {atom: stage for slot, stage in changes for atom in self._atoms[slot]}
        more = 0
        for edge in {edge for atom in new for edge in (atom, atom + 1)}:
            if 0 < edge < num_atoms:
                before, behind = stage_of[edge - 1], stage_of[edge]
                is_cut = new.get(edge - 1, before) != new.get(edge, behind)
                more += (is_cut - (before != behind)) * self._entry_bytes[edge]
        return more

    def _put(self, slot: int, stage: int) -> None:
        cost = self._costs[slot]
        if cost not in self._slots[stage]:
            self._slots[stage][cost] = []
            insort(self._by_cost[stage], cost)
        insort(self._slots[stage][cost], slot)
        self._loads[stage] += cost
        self.stages[slot] = stage
        for atom in self._atoms[slot]:
            self._stage_of[atom] = stage

    def _take(self, slot: int) -> None:
        stage, cost = self.stages[slot], self._costs[slot]
        self._slots[stage][cost].remove(slot)
        if not self._slots[stage][cost]:
            del self._slots[stage][cost]
            del self._by_cost[stage][bisect_left(self._by_cost[stage], cost)]
        self._loads[stage] -= cost
