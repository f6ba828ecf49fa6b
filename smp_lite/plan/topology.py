"""Topology: where a world rank stands on the named axes of parallelism, and who shares its groups.

An ordered list of axes with sizes, outermost first; a rank is the row-major index of its
coordinate, so the last axis varies fastest over ascending world ranks::

    axes (dp 2, pp 2, tp 2)     rank   0  1  2  3  4  5  6  7
                                dp     0  0  0  0  1  1  1  1
                                pp     0  0  1  1  0  0  1  1
                                tp     0  1  0  1  0  1  0  1

A group is a set of ranks that differ only on some axes. SMP names five kinds (and the world); a
system with other axes, or another order of them, brings its own names. Nothing here knows MPI or a
process group, so every layout can be tested in one process. Idea: DeepSpeed's ProcessTopology.
Layouts: the placement strategies of the SMP documentation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["SHARD_AXIS", "SMP_GROUPS", "Topology"]

#: The groups of SMP, each with the axes on which its members differ. DP holds all ranks of one
#: stage; RDP only those that also hold the same tensor-parallel shard.
SMP_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("MP", ("pp", "tp")),
    ("DP", ("dp", "tp")),
    ("PP", ("pp",)),
    ("TP", ("tp",)),
    ("RDP", ("dp",)),
)

SHARD_AXIS = "sdp"
"""The axis of the replicas that share parameters in pieces."""

_AXIS_OF_LETTER = {"D": "dp", "P": "pp", "T": "tp"}
_STRATEGY_ALIASES = {"cluster": "DPT", "spread": "TPD"}


@dataclass(frozen=True)
class Topology:
    """Named axes with sizes, outermost first, and named groups over them.

    Attributes:
        axes: ``(name, size)`` of each axis; the last varies fastest over world ranks.
        kinds: ``(kind, axes)`` of each named group: the axes on which its members differ.
            ``WORLD`` is always there.
    """

    axes: tuple[tuple[str, int], ...]
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"axes must have different names, got {names}")
        for name, size in self.axes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {name!r} must have an integer size of 1 or more, got {size!r}")
        for _, axes in self.kinds:
            self._check_axes(axes)

    @classmethod
    def from_placement(
        cls, world_size: int, pp: int, tp: int, strategy: str, *, sharded: int = 1
    ) -> Topology:
        """Returns the layout that SMP's ``placement_strategy`` names.

        Where replicas share parameters in pieces, the data axis is two: ``dp`` counts the groups of
        replicas, ``sdp`` the members of one, which are consecutive dp ranks. All of SMP's groups are what
        they are without; the ranks of one group of pieces are the kind ``SDP``.

        Args:
            world_size: number of processes, a multiple of ``pp * tp``; the quotient is the
                number of model replicas.
            pp: number of pipeline stages.
            tp: number of tensor-parallel ranks of a stage.
            strategy: ``cluster``, ``spread``, or the letters D, P and T in some order,
                outermost first.
            sharded: number of replicas that hold one copy of the parameters together, in pieces.
        """
        letters = _STRATEGY_ALIASES.get(strategy, strategy)
        if sorted(letters) != sorted(_AXIS_OF_LETTER):
            raise ValueError(
                "placement_strategy must be 'cluster', 'spread' or the letters D, P and T in some "
                f"order, such as 'DPT'; got {strategy!r}"
            )
        if min(world_size, pp, tp) < 1:
            raise ValueError(f"sizes must be 1 or more, got {world_size=}, {pp=}, {tp=}")
        if world_size % (pp * tp):
            raise ValueError(
                f"world size {world_size} is not a multiple of pp x tp = {pp} x {tp}: start a "
                f"multiple of {pp * tp} processes, or choose other degrees"
            )
        sizes = {"dp": world_size // (pp * tp), "pp": pp, "tp": tp}
        axes = [(name, sizes[name]) for name in (_AXIS_OF_LETTER[letter] for letter in letters)]
        if sharded <= 1:
            return cls(tuple(axes), SMP_GROUPS)
        if sizes["dp"] % sharded:
            raise ValueError(
                f"sharded_data_parallel_degree {sharded} does not divide {sizes['dp']}, the number of "
                "replicas"
            )
        place = axes.index(("dp", sizes["dp"]))
        axes[place : place + 1] = [("dp", sizes["dp"] // sharded), (SHARD_AXIS, sharded)]
        within = {"dp": ("dp", SHARD_AXIS)}
        kinds = tuple(
            (kind, tuple(axis for name in names for axis in within.get(name, (name,))))
            for kind, names in SMP_GROUPS
        )
        return cls(tuple(axes), (*kinds, ("SDP", (SHARD_AXIS,))))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes over which one stage of one replica is split; none: a stage is one rank."""
        kinds = dict(self.kinds)
        return tuple(name for name, _ in self.axes if name in kinds.get("TP", ()))

    def axis_size(self, axis: str) -> int:
        """Returns the size of one axis."""
        self._check_axes((axis,))
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the index of ``rank`` on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0 ... {self.world_size - 1}, got {rank}")
        coordinate = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Returns the world rank at ``coordinate``, which has an index for each axis."""
        if set(coordinate) != {name for name, _ in self.axes}:
            raise ValueError(f"a coordinate has the axes {self._names}, got {list(coordinate)}")
        rank = 0
        for name, size in self.axes:
            if not 0 <= coordinate[name] < size:
                raise ValueError(f"{name} must be in 0 ... {size - 1}, got {coordinate[name]}")
            rank = rank * size + coordinate[name]
        return rank

    def group(self, kind: str, rank: int) -> tuple[int, ...]:
        """Returns the world ranks, ascending, of the group of this kind that holds ``rank``."""
        return self.along(self._axes_of(kind), rank)

    def along(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Returns ``rank`` and the world ranks that differ from it on these axes alone, ascending."""
        axes = tuple(axes)
        self._check_axes(axes)
        home = self.coordinate(rank)
        ranges = [range(size) if name in axes else (home[name],) for name, size in self.axes]
        # The product varies its last factor fastest, as ranks do: members come out ascending.
        return tuple(self.rank(dict(zip(self._names, member))) for member in itertools.product(*ranges))

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of this kind, ordered by their lowest world rank."""
        axes = self._axes_of(kind)
        return tuple(
            self.group(kind, rank)
            for rank in range(self.world_size)
            if all(self.coordinate(rank)[axis] == 0 for axis in axes)
        )

    def group_rank(self, kind: str, rank: int) -> int:
        """Returns the index of ``rank`` within its group of this kind."""
        return self.group(kind, rank).index(rank)

    def group_size(self, kind: str) -> int:
        """Returns the number of ranks in each group of this kind."""
        return math.prod(self.axis_size(axis) for axis in self._axes_of(kind))

    @property
    def _names(self) -> list[str]:
        return [name for name, _ in self.axes]

    def _axes_of(self, kind: str) -> tuple[str, ...]:
        kinds = {"WORLD": tuple(self._names), **dict(self.kinds)}
        if kind not in kinds:
            raise ValueError(f"unknown kind of group {kind!r}: choose from {', '.join(kinds)}")
        return kinds[kind]

    def _check_axes(self, axes: Iterable[str]) -> None:
        for axis in axes:
            if axis not in self._names:
                raise ValueError(f"unknown axis {axis!r}: the axes are {self._names}")
