"""``smp.gathered``: the whole model on one rank or on all of them, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from ... import session as session_module
from ...errors import SMPError
from ...nn.guarding import PieceParameter
from ...nn.layout import layout_of
from ...record.parameters.away import is_away
from ...runtime.sharded.whole import whole_parameters

__all__ = ["Brought", "bring", "gathered", "put_back"]


@contextlib.contextmanager
def gathered(model: nn.Module | None = None, rank: int | None = None) -> Iterator[nn.Module]:
    """Within: the model is whole, as a plain module. Collective over the mp group, and over the ranks that
    share sharded parameters.

    For what needs all weights at once: ``generate()`` of transformers, ``save_pretrained``, exporting, plain
    evaluation, weight statistics. Parameters of other stages take their memory for that time.

    Args:
        model: the ``DistributedModel`` (None: the session's), or a copy of its module, such as an average,
            made by ``copy.deepcopy`` or ``torch.optim.swa_utils.AveragedModel``.
        rank: mp rank that gets the whole model; None: all of them. The others get what they have.

    Yields:
        The user's module. What all ranks change in it alike stays, since each keeps its own part; with
        ``rank``, changes of other stages' parameters would be lost and are refused at the end.

    Raises:
        SMPError: inside a step, or a rank does not take part.
    """
    session = session_module.current()
    if session.step is not None:
        raise SMPError("smp.gathered() was used inside a function decorated with @smp.step: use it outside")
    wrapper = session.model if model is None or model is session.model else None
    if model is None and wrapper is None:
        raise SMPError("smp.gathered(): wrap the model with smp.DistributedModel first")
    module: nn.Module = wrapper.module if wrapper is not None else model  # type: ignore[assignment]
    if rank is not None and not 0 <= rank < len(session.group("MP")):
        raise SMPError(f"smp.gathered(rank={rank}): mp ranks go from 0 to {len(session.group('MP')) - 1}")
    layouts = {name: layout_of(parameter) for name, parameter in module.named_parameters()}
    split = [name for name, layout in layouts.items() if layout is not None and any(layout.dims)]
    if split:
        raise SMPError(
            f"smp.gathered(): {', '.join(split[:3])} and others are split over tensor-parallel ranks, so the "
            "module computes only together with them: for whole weights ask model.state_dict()"
        )
    sharded = wrapper.runtime.sharded if wrapper is not None and wrapper.partitioned else None
    if sharded is None:
        pieces = [n for n, parameter in module.named_parameters() if isinstance(parameter, PieceParameter)]
        if pieces:
            raise SMPError(
                f"smp.gathered(): {', '.join(pieces[:3])} and others of this copy are pieces of sharded "
                "parameters: copy the model within smp.gathered(model), or load its model.state_dict()"
            )
        with _gathered(session, wrapper, module, rank):
            yield module
        return
    with (
        whole_parameters(sharded, keep_changes=rank is None) as changed,
        _gathered(session, wrapper, module, rank),
    ):
        yield module
    if changed and rank is not None:
        raise _lost(changed, rank)


@contextlib.contextmanager
def _gathered(
    session: session_module.Session, wrapper: Any, module: nn.Module, rank: int | None
) -> Iterator[None]:
    """Within: what is on other stages is here."""
    if wrapper is not None:
        wrapper.put_away()  # after cpu(), whose copies may be older
    brought = bring(session, module, rank)
    if wrapper is not None:
        wrapper.is_gathered = True
    try:
        yield
    finally:
        if wrapper is not None:
            wrapper.is_gathered = False
        changed = [name for name, tensor, _, version in brought if tensor._version != version]
        put_back(brought)
    if changed and rank is not None:
        raise _lost(changed, rank)


def _lost(changed: list[str], rank: int) -> SMPError:
    return SMPError(
        f"{', '.join(changed[:5])} changed within smp.gathered(rank={rank}), where only that rank saw it, so "
        "the change is lost: change the model on all ranks, with smp.gathered(model)"
    )


Brought: TypeAlias = list[tuple[str, torch.Tensor, torch.Tensor, int]]
"""Of each tensor that was brought here: name, the object, what it was, its version."""


def put_back(brought: Brought) -> None:
    """The tensors are away again, and their memory is free."""
    for _, tensor, away, _ in brought:
        tensor.grad = None
        torch.utils.swap_tensors(tensor, away)


def bring(session: session_module.Session, module: nn.Module, rank: int | None) -> Brought:
    """Makes what is away real, on one mp rank or on all (None). Collective over the mp group."""
    named = dict(module.named_parameters()) | {name: b for name, b in module.named_buffers() if b is not None}
    here = {name: tensor for name, tensor in named.items() if not is_away(tensor)}
    world = session.world
    if world is None:
        return []
    what = "smp.gathered"
    lacking = world.exchange((sorted(named.keys() - here.keys()), rank), "MP", what)
    if len({asked for _, asked in lacking}) > 1:
        raise SMPError(
            f"smp.gathered: the ranks asked for {[asked for _, asked in lacking]}: give all the same rank"
        )
    wanted = {name for number, (names, _) in enumerate(lacking) if rank in (None, number) for name in names}
    mine = {name: here[name].detach().cpu() for name in sorted(wanted & here.keys())}
    found: dict[str, torch.Tensor] = {}
    for part in world.exchange(mine, "MP", what):
        found.update(part)
    missing = sorted(wanted - found.keys())
    if missing:
        raise SMPError(f"smp.gathered: no rank holds {', '.join(missing[:5])}")
    brought = []
    if rank in (None, session.group_rank("MP")):
        for name in sorted(wanted - here.keys()):
            tensor: Any = named[name]
            value = found[name].clone()
            real = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            torch.utils.swap_tensors(tensor, real)
            # The two objects have changed places: `tensor` is real now, and `real` is away.
            brought.append((name, tensor, real, tensor._version))
    return brought
