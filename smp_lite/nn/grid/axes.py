"""The axes of one block of ranks, and the whole batch to parts and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...comm.collectives import Collectives
from ...comm.groups.axis import Axis
from ...plan.topology import Topology
from ...record.values.parts import mark_part
from ..one_d.operations import gather_along, split_along
from .checks import check_divides

__all__ = ["Collect", "axes_of_block", "join_parts", "split_parts", "square_root"]

Collect = Callable[[tuple[int, ...]], Collectives]
"""Makes the collectives of some world ranks, such as ``Transport.collectives``."""


def axes_of_block(
    sizes: Sequence[tuple[str, int]], ranks: Sequence[int], rank: int, collect: Collect | None
) -> tuple[Axis, ...]:
    """The axes through one rank of a block.

    Args:
        sizes: name and size of each axis, outermost first: the last varies fastest over ``ranks``.
        ranks: world ranks of the block, ascending.
        rank: the world rank whose axes these are, one of them.
        collect: makes collectives; None where there are no processes.

    Raises:
        ValueError: another number of ranks, or not ascending, or without ``rank``.
    """
    topology = Topology(tuple(sizes), tuple((name, (name,)) for name, _ in sizes))
    if len(ranks) != topology.world_size:
        shape = " x ".join(f"{name} {size}" for name, size in sizes)
        raise ValueError(f"{shape} needs {topology.world_size} ranks, got {len(ranks)}: {list(ranks)}")
    if list(ranks) != sorted(set(ranks)):
        raise ValueError(f"the ranks of a block must ascend, got {list(ranks)}")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the block {list(ranks)}")
    here = list(ranks).index(rank)
    return tuple(_axis(topology, name, here, tuple(ranks), collect) for name, _ in sizes)


def _axis(topology: Topology, name: str, here: int, ranks: tuple[int, ...], collect: Collect | None) -> Axis:
    members = tuple(ranks[place] for place in topology.group(name, here))
    make = None if collect is None else lambda: collect(members)
    return Axis(name, members, topology.coordinate(here)[name], make)


def square_root(count: int, what: str, power: int = 2) -> int:
    """The whole root of a number of ranks.

    Raises:
        ValueError: it has none; names the nearest numbers that have.
    """
    below = max(root for root in range(count + 2) if root**power <= count)
    if count < 1 or below**power != count:
        nearest = f"{below**power} or {(below + 1) ** power}" if below else "1"
        kind = "square" if power == 2 else "cube"
        raise ValueError(f"{what}: {count} ranks are no {kind}; the nearest: {nearest}")
    return below


def split_parts(
    x: torch.Tensor, what: str, rows: Sequence[Axis], features: Axis | None, dim: int = 0
) -> torch.Tensor:
    """This rank's part of a tensor that all ranks hold; the gradient is whole again, on all of them.

    Args:
        what: the layout, for errors.
        rows: axes that split dimension ``dim``, the major one first.
        features: the axis that splits the last one; None: nothing does.
    """
    if x.dim() <= dim + (features is not None):
        raise ValueError(f"{what}: cannot split a tensor of shape {list(x.shape)}")
    tensor = f"of a tensor of shape {list(x.shape)},"
    batch = " (the batch)" if dim == 0 else ""
    check_divides(f"{what}: dimension {dim}{batch} {tensor}", x.shape[dim], rows)
    if features is not None:
        check_divides(f"{what}: the features {tensor}", x.shape[-1], (features,))
    cuts = [*([(features, -1)] if features is not None else []), *((axis, dim) for axis in rows)]
    part = x
    for axis, along in cuts:
        part = split_along(part, axis, along)
    how = ", ".join(f"dimension {along} over {axis.name}" for axis, along in cuts)
    return mark_part(part, x, how, lambda whole: _cut(whole, cuts))


def _cut(whole: torch.Tensor, cuts: Sequence[tuple[Axis, int]]) -> torch.Tensor:
    for axis, dim in cuts:
        whole = axis.part(whole, dim)
    return whole


def join_parts(
    y: torch.Tensor, rows: Sequence[Axis], features: Axis | None, num_features: int | None, dim: int = 0
) -> torch.Tensor:
    """The whole tensor, on all ranks; they must all do the same with it.

    Args:
        num_features: without padding; None: there is none.
    """
    if features is not None:
        y = gather_along(y, features, -1, gradients="same")
        if num_features is not None:
            if not 0 < num_features <= y.shape[-1]:
                raise ValueError(f"{num_features} features of {y.shape[-1]}")
            y = y.narrow(-1, 0, num_features)
    for axis in reversed(rows):
        y = gather_along(y, axis, dim, gradients="same")
    return y
