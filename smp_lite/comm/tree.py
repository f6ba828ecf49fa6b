"""Who speaks to whom when all members of a group must hear of each other: a few at the top, trees below.

The first :data:`RADIX` members of a group, the *fellows*, send to each other; each of the others has a
parent, and each member at most ``RADIX`` children. So a group of up to ``RADIX`` is a roll call, every member
telling every other, which is the fastest for few; in a larger one no member sends more than ``2 RADIX - 1``
messages, all together about two for each member, and the way is about ``2 log(size) / log(RADIX)`` messages
long. (Trees of fixed degree are the textbook's; a full exchange at the top instead of one root saves a
message's time, and makes the small group no case of its own.)

Everything here is arithmetic on positions in a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["RADIX", "Place", "nearby", "place", "subtree"]

RADIX = 8

_ALL_UP_TO = 32


class Place(NamedTuple):
    """Where a member stands; positions in the group."""

    parent: int | None
    fellows: tuple[int, ...]
    children: tuple[int, ...]

    @property
    def neighbours(self) -> tuple[int, ...]:
        above = () if self.parent is None else (self.parent,)
        return (*above, *self.fellows, *self.children)


def place(size: int, index: int, radix: int = RADIX) -> Place:
    """Of one member of a group of that size."""
    parent = None if index < radix else (index - radix) // radix
    fellows = tuple(i for i in range(min(size, radix)) if i != index) if parent is None else ()
    first = radix * (index + 1)
    return Place(parent, fellows, tuple(range(min(first, size), min(first + radix, size))))


def subtree(size: int, index: int, radix: int = RADIX) -> Iterator[int]:
    """A member and all below it."""
    first, end = index, index + 1
    while first < size:
        yield from range(first, min(end, size))
        first, end = radix * (first + 1), radix * (end + 1)


def nearby(size: int, index: int) -> tuple[int, ...]:
    """Whom a member tells what all should hear by and by, each passing it on to its own.

    All others in a small group; else those at distances of powers of two on a ring, so that word goes round
    in ``log(size)`` steps and on many ways, whoever has ended already.
    """
    if size <= _ALL_UP_TO:
        return tuple(i for i in range(size) if i != index)
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return tuple(sorted({(index + sign * step) % size for step in steps for sign in (1, -1)} - {index}))
