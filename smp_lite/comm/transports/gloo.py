"""torch.distributed over gloo, between processes that have met at a store."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import SMPError
from ..waiting import watchdog_s

__all__ = [
    "check_ranks",
    "destroy_process_groups",
    "group_timeout",
    "init_gloo",
    "new_gloo_group",
    "use_loopback",
]

_LEAST_GROUP_TIMEOUT_S = 1800.0


def init_gloo(store: dist.Store, rank: int, size: int, *, one_machine: bool) -> None:
    """Initialises torch.distributed, if it is not yet, on a store at which all ranks have met.

    Args:
        store: for this alone.
        rank: of this process.
        size: number of processes.
        one_machine: all of them share a machine.
    """
    if dist.is_initialized():
        return check_ranks(rank, size)
    use_loopback(one_machine)
    timeout = timedelta(seconds=watchdog_s())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def check_ranks(rank: int, size: int) -> None:
    """What the script has initialised must count as we do."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise SMPError(
            f"torch.distributed is initialised already, with rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but this is rank {rank} of {size}: let smp.init() initialise it, or "
            "use the same ranks"
        )


def new_gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group that nobody else uses; collective over its members."""
    return dist.new_group(list(ranks), group_timeout(), backend="gloo", use_local_synchronization=True)


def group_timeout() -> timedelta:
    """Far beyond the watchdog's limit: a wait of ours ends first, and says for whom it waited."""
    return timedelta(seconds=max(2 * watchdog_s(), _LEAST_GROUP_TIMEOUT_S))


def use_loopback(one_machine: bool) -> None:
    """gloo finds its address by the host's name, which need not resolve to one that works."""
    if one_machine and "GLOO_SOCKET_IFNAME" not in os.environ and _has_loopback():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def destroy_process_groups() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
