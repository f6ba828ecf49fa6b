"""The functions a script calls without an object: ranks, groups, messages, placement.

Names and meanings are the SMP API's ("smdistributed.modelparallel common API"), for one tensor-parallel
rank. Groups are named by :class:`CommGroup`, ranks in messages by :class:`RankType`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch import nn

from . import session as session_module
from .errors import SMPError
from .session import current


class CommGroup(Enum):
    """A group of ranks that this rank is in."""

    WORLD = "WORLD"
    MP_GROUP = "MP"
    DP_GROUP = "DP"
    PP_GROUP = "PP"
    TP_GROUP = "TP"
    RDP_GROUP = "RDP"


class RankType(Enum):
    """What a rank number counts."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP"
    DP_RANK = "DP"
    PP_RANK = "PP"
    TP_RANK = "TP"
    RDP_RANK = "RDP"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


# Ranks and groups -------------------------------------------------------------------------------------------


def rank() -> int:
    """World rank of this process."""
    return current().rank


def size() -> int:
    """Number of processes."""
    return len(current().group("WORLD"))


def local_rank() -> int:
    """Rank among the processes of this host."""
    world = current().world
    return world.local_rank if world else 0


def local_size() -> int:
    """Number of processes on this host."""
    world = current().world
    return world.local_size if world else 1


def _group_rank(kind: str) -> Callable[[], int]:
    def getter() -> int:
        return current().group_rank(kind)

    getter.__name__ = f"{kind.lower()}_rank"
    getter.__doc__ = f"Rank of this process within its {kind} group."
    return getter


def _group_size(kind: str) -> Callable[[], int]:
    def getter() -> int:
        return len(current().group(kind))

    getter.__name__ = f"{kind.lower()}_size"
    getter.__doc__ = f"Number of processes in this process's {kind} group."
    return getter


def _group(kind: str) -> Callable[[], list[int]]:
    def getter() -> list[int]:
        return list(current().group(kind))

    getter.__name__ = f"get_{kind.lower()}_group"
    getter.__doc__ = f"World ranks of this process's {kind} group, ascending."
    return getter


def _process_group(kind: str) -> Callable[[], Any]:
    def getter() -> Any:
        session = current()
        if not session.process_groups and session.world is None and session.cfg.ddp:
            from .comm.groups.process_groups import groups_of_one_process

            session.process_groups = groups_of_one_process()
        groups = session.process_groups
        if not groups:
            raise SMPError(
                f"smp.get_{kind.lower()}_process_group() needs torch.distributed: set ddp: True in the "
                "parameters"
            )
        return groups[kind]

    getter.__name__ = f"get_{kind.lower()}_process_group"
    getter.__doc__ = f"torch ProcessGroup of this process's {kind} group; needs ``ddp: True``."
    return getter


mp_rank, mp_size, get_mp_group = _group_rank("MP"), _group_size("MP"), _group("MP")
dp_rank, dp_size, get_dp_group = _group_rank("DP"), _group_size("DP"), _group("DP")
pp_rank, pp_size, get_pp_group = _group_rank("PP"), _group_size("PP"), _group("PP")
tp_rank, tp_size, get_tp_group = _group_rank("TP"), _group_size("TP"), _group("TP")
rdp_rank, rdp_size, get_rdp_group = _group_rank("RDP"), _group_size("RDP"), _group("RDP")
get_world_process_group = _process_group("WORLD")
get_mp_process_group, get_dp_process_group = _process_group("MP"), _process_group("DP")
get_pp_process_group, get_tp_process_group = _process_group("PP"), _process_group("TP")
get_rdp_process_group = _process_group("RDP")


def is_tracing() -> bool:
    """True while the model is run once to find out what its modules cost."""
    return session_module.is_initialized() and current().is_tracing


# Messages ---------------------------------------------------------------------------------------------------


def broadcast(obj: Any, group: CommGroup = WORLD) -> None:
    """Sends any picklable object to all others of the group.

    Only the sender calls this; every other member calls ``recv_from(sender, rank_type)``.
    """
    session = current()
    others = [rank for rank in session.group(_kind(group)) if rank != session.rank]
    if others:
        _world().send_object(obj, others, "broadcast")


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends any picklable object; blocks until it is being received."""
    _world().send_object(obj, [_world_rank(dest_rank, rank_type)], "send")


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Receives what ``src_rank`` sent or broadcast."""
    return _world().receive_object(_world_rank(src_rank, rank_type), "recv_from")


def allgather(obj: Any, group: CommGroup = WORLD) -> list[Any]:
    """Every member's object, indexed by group rank. Collective over the group."""
    if current().world is None:
        return [obj]
    return _world().exchange(obj, _kind(group), "allgather")


def barrier(group: CommGroup = WORLD) -> None:
    """Waits for all members of the group."""
    if current().world is not None:
        _world().barrier(_kind(group))


def mp_barrier() -> None:
    barrier(MP_GROUP)


def dp_barrier() -> None:
    barrier(DP_GROUP)


def pp_barrier() -> None:
    barrier(PP_GROUP)


def tp_barrier() -> None:
    barrier(TP_GROUP)


def rdp_barrier() -> None:
    barrier(RDP_GROUP)


def _kind(group: CommGroup) -> str:
    if not isinstance(group, CommGroup):
        raise TypeError(f"group must be one of smp.WORLD, smp.MP_GROUP, smp.DP_GROUP ..., got {group!r}")
    return str(group.value)


def _world_rank(number: int, rank_type: RankType) -> int:
    if not isinstance(rank_type, RankType):
        raise TypeError(f"rank_type must be an smp.RankType, got {rank_type!r}")
    group = current().group(rank_type.value)
    if not 0 <= number < len(group):
        raise ValueError(f"{rank_type.name} {number} does not exist: the group has {len(group)} members")
    return group[number]


def _world() -> Any:
    world = current().world
    if world is None:
        raise SMPError("there is one process only: nobody to send to or receive from")
    return world


# Placement --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules constructed inside belong to partition ``index``; the innermost context wins.

    Honoured with ``auto_partition: False`` only, as in SMP.

    Raises:
        ValueError: there is no such partition.
    """
    session = current()
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < session.num_stages:
        raise ValueError(
            f"smp.partition({index!r}): partitions={session.num_stages}, so the index must be an int from 0 "
            f"to {session.num_stages - 1}"
        )
    session.partition_stack.append(index)
    try:
        with _construction_noted(session):
            yield
    finally:
        session.partition_stack.pop()


def set_partition(module: nn.Module, index: int) -> None:
    """Puts a module with everything in it on a partition; before the first step.

    Honoured with ``auto_partition: False`` only, like :func:`partition`, since AWS's scripts call it also
    where the launcher has decided otherwise.

    Raises:
        SMPError: the model is partitioned already.
        ValueError: there is no such partition.
    """
    session = current()
    if session.cfg.auto_partition:
        return
    if session.model is not None and session.model.partitioned and session.num_stages > 1:
        raise SMPError("smp.set_partition was called after the first step: the model is partitioned already")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < session.num_stages:
        raise ValueError(
            f"smp.set_partition(..., {index!r}): partitions={session.num_stages}, so the index must be an "
            f"int from 0 to {session.num_stages - 1}"
        )
    for part in module.modules():
        session.assigned_stages[id(part)] = (part, index)


@contextlib.contextmanager
def _construction_noted(session: session_module.Session) -> Iterator[None]:
    """While the outermost context is open, the stage of each new module is noted.

    Copies count as new, and they are made without ``__init__``: ``nn.TransformerEncoder`` fills itself with
    deep copies of one layer, which come to life in ``__setstate__``.
    """
    if len(session.partition_stack) > 1:
        yield
        return
    births = {name: getattr(nn.Module, name) for name in ("__init__", "__setstate__")}

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def born(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            session.assigned_stages.setdefault(id(module), (module, session.partition_stack[-1]))

        return born

    for name, original in births.items():
        setattr(nn.Module, name, noting(original))
    try:
        yield
    finally:
        for name, original in births.items():
            setattr(nn.Module, name, original)
