"""Replicas that have stepped otherwise, so that they train different models: in what, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import SMPMismatch

__all__ = ["Said", "drift_between"]

Said = tuple[int, list[str], list[tuple[str, int]]]
"""Of one replica: its rank, what its script has done between steps, sums of the bits of parameters."""

_ADVICE = (
    "Replicas hold the same model and must step it alike: leave out steps, set rates, clip and change "
    "weights by what all of them know, such as the mean of smp.allgather(loss, smp.DP_GROUP), never by this "
    "replica's own loss"
)


def drift_between(heard: Sequence[Said]) -> SMPMismatch:
    """The error for all members.

    Args:
        heard: of every member, in the order of ranks.
    """
    first, lines, values = heard[0]
    for rank, other_lines, other_values in heard[1:]:
        for line, other in zip(lines, other_lines, strict=False):
            if line != other:
                return SMPMismatch(
                    f"replicas have drifted apart: rank {first} {line}, rank {rank} {other}. {_ADVICE}"
                )
        for (name, bits), (_, other_bits) in zip(values, other_values, strict=False):
            if bits != other_bits:
                return SMPMismatch(
                    f"replicas have drifted apart: the parameter {name!r} is not the same on ranks {first} "
                    f"and {rank}. {_ADVICE}"
                )
    return SMPMismatch(f"replicas have drifted apart, in what they do between steps. {_ADVICE}")
