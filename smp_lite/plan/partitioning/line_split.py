"""The best contiguous split of a line of slots: exact, in time that grows with the line, not its square.

Two facts make the dynamic programme short. Within the smallest possible bound the end of a part can lie only
between where greedy filling from the back and from the front would put it; in an even line these are few
places. And what a split costs, ``(p(e) - p(s))^2`` for running totals ``p``, or infinitely much above the
bound, has the quadrangle inequality (Yao 1980): once a later start is better for some end, it is for all
further ends. So the starts that are ever best, and from which end on, are found in one pass over a part
(the queue of candidates of Galil and Park 1992), by one division and one bisection for each start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import add

__all__ = ["best_split", "smallest_bound"]


def smallest_bound(ends: Sequence[int], num_parts: int) -> int:
    """The smallest largest part of any split into at most `num_parts` contiguous parts, for the
    running totals `ends` (0 first): is there a split with no part above this bound?
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


def best_split(ends: Sequence[int], entry_bytes: Sequence[int], num_parts: int, bound: int) -> list[int]:
    """The starts of `num_parts` parts, none empty and none above `bound`, with the fewest bytes cut, then the
    smallest sum of squared parts, then the earliest cuts, the last one first.

    Args:
        ends: running totals of the costs, 0 first.
        entry_bytes: of each slot, what a cut in front of it sends.
        num_parts: at most as many as slots.
        bound: of :func:`smallest_bound`.
    """
    num_slots = len(ends) - 1
    # One number for both: a byte outweighs all squares.
    byte = ends[-1] ** 2 + 1
    entry = [byte * size + end * end for size, end in zip(entry_bytes, ends)]
    entry[0] = 0
    expiry = [bisect_right(ends, end + bound) for end in ends]
    first, last = _ranges(ends, num_parts, bound)
    # What the parts so far have cost, by where they end: there is one such place, then several in a row.
    best, begin = [0], 0
    found: list[tuple[list[int], list[int]]] = []
    for part in range(1, num_parts + 1):
        stop = min(begin + len(best), num_slots)
        values = list(map(add, best, entry[begin:stop]))
        starts, since = _best_starts(values, begin, ends, expiry, first[part], last[part])
        best = []
        for start, here, following in zip(starts, since, [*since[1:], last[part] + 1], strict=True):
            value, double = values[start - begin], 2 * ends[start]
            best += [value + end * (end - double) for end in ends[here:following]]
        begin = first[part]
        found.append((starts, since))
    cuts = []
    place = num_slots
    for starts, since in reversed(found):
        place = starts[bisect_right(since, place) - 1]
        cuts.append(place)
    return cuts[::-1]


def _ranges(ends: Sequence[int], num_parts: int, bound: int) -> tuple[list[int], list[int]]:
    """For each number of parts the first and the last place where they may end."""
    num_slots = len(ends) - 1
    first, last = [num_slots], [0]
    for _ in range(num_parts):
        first.append(bisect_left(ends, ends[first[-1]] - bound))
        last.append(bisect_right(ends, ends[last[-1]] + bound) - 1)
    first.reverse()
    # No part is empty.
    return (
        [max(place, part) for part, place in enumerate(first)],
        [min(place, num_slots - num_parts + part) for part, place in enumerate(last)],
    )


def _best_starts(
    values: Sequence[int], begin: int, ends: Sequence[int], expiry: Sequence[int], first: int, last: int
) -> tuple[list[int], list[int]]:
    """The starts that are best for some end from `first` to `last`, the earliest of equally good ones, and
    the end from which on each of them is.

    Args:
        values: what the starts have cost, the first one at `begin`.
    """
    queue: list[int] = []
    since: list[int] = []
    for start, value in enumerate(values, begin):
        place = first
        here = ends[start]
        while queue:
            other = queue[-1]
            longer = here - ends[other]
            more = value - values[other - begin]
            place = expiry[other]
            if longer:
                # Mostly it is better only where the other one's part would be too large.
                if more < 2 * longer * ends[place - 1]:
                    place = bisect_right(ends, more // (2 * longer), min(start, place), place)
            elif more < 0:
                place = first
            if place <= start:
                place = start + 1
            if place > since[-1]:
                break
            queue.pop()
            since.pop()
        if not queue:
            place = first
        if place <= last:
            queue.append(start)
            since.append(place)
    return queue, since
