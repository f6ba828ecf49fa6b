"""Which consecutive children of a Sequential are computed again together: SMP's strategies.

From the SMP API reference of ``smp.set_activation_checkpointing``: ``each`` takes every child for itself,
``contiguous`` all consecutive children of one partition together, ``group_n`` as many as n of them. Groups
are made from the front, as large as they may be; what is left over makes a smaller one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["group_children", "group_size"]

_STRATEGY = re.compile(r"each|contiguous|group_([1-9]\d*)")


def group_size(strategy: object) -> int | None:
    """How many children a group has at most; None: any number.

    Raises:
        ValueError: there is no such strategy.
    """
    match = _STRATEGY.fullmatch(strategy) if isinstance(strategy, str) else None
    if match is None:
        raise ValueError(f"strategy={strategy!r} must be 'each', 'contiguous' or 'group_n' with a number n")
    if match[1]:
        return int(match[1])
    return 1 if strategy == "each" else None


def group_children(partitions: Sequence[int | None], strategy: str) -> list[tuple[int, ...]]:
    """Groups of children, by their numbers.

    Args:
        partitions: of each child; None: it has none, and goes with the child before it (a ReLU runs where
            its input is).
        strategy: ``each``, ``contiguous`` or ``group_n``.

    Raises:
        ValueError: there is no such strategy.
    """
    most = group_size(strategy)
    groups: list[list[int]] = []
    present: int | None = None  # partition of the last group
    for number, partition in enumerate(partitions):
        fits = partition is None or present is None or partition == present
        if groups and fits and (most is None or len(groups[-1]) < most):
            groups[-1].append(number)
            present = present if partition is None else partition
        else:
            groups.append([number])
            # Where a stateless child begins a group, its input comes from the partition before.
            present = partition if partition is not None else present
    return [tuple(group) for group in groups]
