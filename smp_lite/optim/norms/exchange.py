"""A norm over the mp group: what each rank adds to it, and what comes of it.

Each rank computes the norms of the tensors that live there as torch would, and one roll call makes them known
to all; it also says which ranks did not call, or called for something else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from ...errors import SMPError, SMPMismatch
from ...nn.guarding import plain, unguarded
from ...nn.layout import ParameterLayout, layout_of
from ..state.own_parameters import OwnParameters
from .parts import FOREIGN, Norm, Part, as_in_one_process, of_stage

if TYPE_CHECKING:
    from ...session import Session

__all__ = ["Call", "Item", "total_norm"]


@dataclass(frozen=True)
class Item:
    """A tensor that a function was given.

    Attributes:
        number: of the parameter that it, or whose gradient it is; FOREIGN: not the model's.
        tensor: itself; None: it lives on another stage.
    """

    number: int
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class Call:
    """What a function was asked for.

    Attributes:
        what: its name.
        arguments: that must be the same on all ranks.
        is_single: it was given one tensor.
        foreach: as given.
    """

    what: str
    arguments: dict[str, float]
    is_single: bool
    foreach: bool | None

    def compare(self, theirs: dict[str, float], their_rank: int, rank: int) -> None:
        """Raises SMPMismatch where another rank asked for something else."""
        for name, mine in self.arguments.items():
            if repr(theirs[name]) != repr(mine):
                raise SMPMismatch(
                    f"{self.what}: {name} is {theirs[name]} on rank {their_rank} and {mine} on rank {rank}: "
                    "it must be the same on all ranks of the mp group"
                )


def total_norm(
    session: Session,
    call: Call,
    items: list[Item],
    counted: list[torch.Tensor | None],
    error_if_nonfinite: bool,
) -> tuple[torch.Tensor, bool]:
    """The norm of what counts on all ranks, and whether all of them were given nothing.

    Collective over the mp group.

    Args:
        session: of a partitioned model.
        call: what was asked for.
        items: what this rank was given.
        counted: for each of them the tensor whose norm counts; None: none, or not here.
        error_if_nonfinite: the norm must be finite.
    """
    own = session.model.own_parameters
    assert session.world is not None
    failure: Exception | None = None
    part = None
    try:
        part = _part(session, call, items, counted)
    except Exception as error:  # raised when the others have heard of it
        failure = error
    said = (call.arguments, part, None if failure is None else str(failure))
    heard = session.world.exchange(said, session.replica, call.what)
    if failure is not None:
        raise failure
    ranks = session.group(session.replica)
    for rank, (arguments, _, error) in zip(ranks, heard, strict=True):
        if error is not None:
            raise SMPError(f"{call.what} failed on rank {rank}: {error}")
        call.compare(arguments, rank, session.rank)

    def describe(member: int, numbers: Sequence[int]) -> str:
        names = [own.names[number % len(own.names)] for number in numbers]
        more = ", ..." if len(names) > 3 else ""
        return f"rank {stages[member][0]} gave {', '.join(map(repr, names[:3]))}{more}"

    stages = _by_stage(session, ranks)
    heard_from = {rank: part for rank, (_, part, _) in zip(ranks, heard, strict=True)}
    norm_type = call.arguments["norm_type"]
    parts = [of_stage(call.what, [heard_from[rank] for rank in sharing], norm_type) for sharing in stages]
    norms = as_in_one_process(call.what, parts, _orders(session), describe)
    total = _norm_of(norms, call.arguments["norm_type"], session.device)
    if error_if_nonfinite and not torch.isfinite(total):
        # torch's own words (torch.nn.utils.get_total_norm).
        raise RuntimeError(
            f"The total norm of order {call.arguments['norm_type']} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    return total, not any(part.named for part in parts)


def _part(session: Session, call: Call, items: list[Item], counted: list[torch.Tensor | None]) -> Part:
    """What this rank adds."""
    own = session.model.own_parameters
    positions = [i for i, tensor in enumerate(counted) if tensor is not None]
    tensors = [tensor for tensor in counted if tensor is not None]
    with unguarded():
        of_tensors = _norms(list(map(plain, tensors)), call.arguments["norm_type"], call.foreach)
    norms = dict(zip(positions, of_tensors, strict=True))
    mine = {items[i].number for i in positions} - {FOREIGN}
    here = own.with_gradient()
    weights = {len(own.names) + number for number in own.local}
    groups = {i: members & here for i, members in enumerate(map(frozenset, _numbers_in_groups(session)))}
    chosen = frozenset(i for i, members in groups.items() if members and members <= mine)
    covered = frozenset().union(*(groups[i] for i in chosen))
    of_parts = set()
    for position in list(norms):
        layout = layout_of_item(own, items[position])
        if layout is not None:
            of_parts.add(position)
            if call.arguments["norm_type"] < 0:
                raise ValueError(
                    f"{call.what}: norm_type {call.arguments['norm_type']:g} of parameters that are split "
                    "over ranks: give one of 0 or more"
                )
            split = {axis.name for axis in layout.axes}
            coordinate = session.topology.coordinate(session.rank)
            if any(coordinate[axis] for axis in session.stage_axes if axis not in split):
                del norms[position]  # another rank has the same part
    return Part(
        named=tuple(item.number for item in items),
        norms=norms,
        of_parts=frozenset(of_parts),
        is_single=call.is_single,
        is_whole=mine in (here, weights),
        groups=chosen if covered == mine else frozenset(),
        populated=frozenset(i for i, members in groups.items() if members),
    )


def layout_of_item(own: OwnParameters, item: Item) -> ParameterLayout | None:
    """How the parameter lies that the item is, or whose gradient it is; None: it is whole on this rank."""
    if item.number == FOREIGN or item.tensor is None:
        return None
    return layout_of(own.parameter(item.number % len(own.names)))


def _by_stage(session: Session, ranks: Sequence[int]) -> list[list[int]]:
    """The ranks that share each stage, the stage of the lowest rank first."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(session.stage_of(rank), []).append(rank)
    return list(found.values())


def _numbers_in_groups(session: Session) -> list[list[int]]:
    """Of the parameters in each of the optimizer's groups."""
    own: OwnParameters = session.model.own_parameters
    optimizer = session.optimizer
    if optimizer is None:
        return []
    return [[own.number(name) for name in names if name is not None] for names in optimizer.names_in_groups]


def _orders(session: Session) -> list[Sequence[int]]:
    """The model's, and the optimizer's."""
    own: OwnParameters = session.model.own_parameters
    by_optimizer = [number for numbers in _numbers_in_groups(session) for number in numbers]
    return [range(2 * len(own.names)), *([by_optimizer] if by_optimizer else [])]


def _norms(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> list[Norm]:
    """Of each tensor, by the function that torch would use (torch.nn.utils.get_total_norm)."""
    found: dict[int, torch.Tensor] = {}
    if not tensors:
        return []
    grouped = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    for (device, _), ([group], indices) in grouped.items():
        if (foreach is None and _has_foreach_support(group, device)) or (  # type: ignore[arg-type]
            foreach and _device_has_foreach_support(device)
        ):
            norms = torch._foreach_norm(group, norm_type)  # type: ignore[arg-type]
        elif foreach:
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
            )
        else:
            norms = tuple(torch.linalg.vector_norm(tensor, norm_type) for tensor in group)
        found.update(zip(indices, norms, strict=True))
    ordered = [found[i] for i in range(len(tensors))]
    # Stacking goes to the widest dtype and from there to Python's doubles: both keep every bit.
    values = torch.stack(ordered).tolist()
    return [Norm(v, t.dtype, n.dtype) for v, t, n in zip(values, tensors, ordered, strict=True)]


def _norm_of(norms: Sequence[Norm], norm_type: float, device: torch.device) -> torch.Tensor:
    """Of the norms, stacked as torch would stack them: grouped by the dtype of the tensors."""
    if not norms:
        return torch.tensor(0.0)
    if len({norm.kind for norm in norms}) > 1:
        # The order of the groups is that of a hash table of torch's, so torch is asked.
        empty = {norm.kind: torch.empty(0, dtype=norm.kind, device=device) for norm in norms}
        stand_ins = [empty[norm.kind] for norm in norms]
        grouped = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
        norms = [norms[i] for _, indices in grouped.values() for i in indices]
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms])
    stacked = torch.tensor([norm.value for norm in norms], dtype=dtype, device=device)
    return torch.linalg.vector_norm(stacked, norm_type)
