"""Before it is cut, the model is the same on all ranks of a pp group: rank 0's of the group, if they differ.

Each stage keeps what its rank has built. Where only one rank has loaded weights (``if smp.rank() == 0:
model.load_state_dict(...)``, which suits data parallelism, where they are sent to all), or where each has
seeded otherwise, the stages would be those of several models. As replicas do (Li et al. 2020, "PyTorch
Distributed", section 3.1), they begin with those of the first. What has no memory yet (delayed
initialization) nobody can send: each stage makes its own, so all must be about to make the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.layout import arrival, as_bytes, departure
from ..comm.waiting import wait_until
from ..deferred import is_deferred, origin_of
from ..errors import SMPMismatch
from ..nn.guarding import plain
from ..nn.layout import layout_of
from ..record.parameters.away import is_away
from ..record.values.memory import digest_of
from ..record.values.placed import TensorMeta

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["take_over_first"]

_GROUP = "PP"
_WHAT = "the weights that ranks have built"


def take_over_first(session: Session, module: nn.Module) -> None:
    """Collective over the pp group.

    Raises:
        SMPMismatch: a parameter or buffer has another shape or type on another rank.
    """
    world = session.world
    if world is None or len(session.group(_GROUP)) == 1:
        return
    own = _whole_tensors(module)
    mine = {name: _said(tensor) for name, tensor in own.items()}
    answers = world.exchange((mine, _origins(module)), _GROUP, _WHAT)
    heard: list[dict[str, Any]] = [tensors for tensors, _ in answers]
    ranks = session.group(_GROUP)
    _check_origins([origins for _, origins in answers], ranks)
    first = heard[0]
    names = [name for name in first if all(name in theirs for theirs in heard)]
    for name in names:
        for rank, theirs in zip(ranks, heard, strict=True):
            if theirs[name][:2] != first[name][:2]:
                forms = [f"{kind}{list(shape)}" for shape, kind, *_ in (theirs[name], first[name])]
                raise SMPMismatch(
                    f"{name!r} is {forms[0]} on rank {rank} and {forms[1]} on rank {ranks[0]}: build the "
                    "same model on all ranks"
                )
    differing = [name for name in names if any(theirs[name] != first[name] for theirs in heard)]
    if not differing:
        return
    collectives = world.collectives(_GROUP)
    is_first = world.group_rank(_GROUP) == 0
    for name in differing:
        tensor = plain(own[name])
        if 0 in tensor.stride():
            raise SMPMismatch(
                f"{name!r} has other numbers on the ranks {list(ranks)}, and several of its elements are one "
                "in memory (expand), so the first rank's cannot be taken: build the same on all ranks"
            )
        meta = TensorMeta.of(tensor)._replace(stride=first[name][2], requires_grad=False)
        row = departure(tensor, meta) if is_first else arrival(meta)
        pending = collectives.broadcast(as_bytes(row), 0)
        wait_until(pending.done, lambda: f"not all ranks of the pp group {list(ranks)} came to {_WHAT}")
        if not is_first:
            with torch.no_grad():
                tensor.copy_(row)
    if is_first:
        warnings.warn(
            f"the ranks {list(ranks)} have built models with other numbers in {len(differing)} parameters "
            f"and buffers ({differing[0]!r} is the first): those of rank {ranks[0]} are taken, as in data "
            "parallelism. Seed ranks alike, or by smp.dp_rank(), and load weights on all of them",
            stacklevel=2,
        )


def _origins(module: nn.Module) -> dict[str, int]:
    """Of what is made later, what it will be made from."""
    named = (*module.named_parameters(), *module.named_buffers())
    known: dict[Any, Any] = {}
    return {name: origin_of(tensor.smp_place, known) for name, tensor in named if is_deferred(tensor)}  # type: ignore[attr-defined]


def _check_origins(heard: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> None:
    for rank, origins in zip(ranks, heard, strict=True):
        for name, origin in origins.items():
            if heard[0].get(name, origin) != origin:
                raise SMPMismatch(
                    f"the parameter {name!r}, whose initialization is delayed, would begin with other "
                    f"numbers on rank {rank} than on rank {ranks[0]}, and each stage makes its own: seed "
                    "these ranks alike before the model is built (by smp.dp_rank(), never by rank)"
                )


def _said(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, tuple[int, ...], int]:
    """Shape, type, strides and a digest of the numbers, in their places."""
    found = plain(tensor)
    kind = str(found.dtype).removeprefix("torch.")
    return tuple(found.shape), kind, tuple(found.stride()), digest_of(found.cpu())


def _whole_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that have memory here and lie on no rank in part."""
    return {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not nn.parameter.is_lazy(tensor)
        and not is_deferred(tensor)
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_away(tensor)
        and not (isinstance(tensor, nn.Parameter) and layout_of(tensor) is not None)
    }
