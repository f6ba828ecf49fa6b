"""torch.distributed: what ``ddp: True`` and ``smp.get_dp_process_group()`` need, and a job without MPI.

Beside MPI, rank 0 offers a store on a free port (``ddp_port`` or ``MASTER_PORT`` if given) and tells the
others by MPI, so nothing has to be set by hand and two jobs on one host do not meet. Without MPI the ranks
have met at a store already.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SMPError
from .waiting import watchdog_s
from .world import World

_LEAST_GROUP_TIMEOUT_S = 1800.0


def init_process_groups(world: World, *, backend: str, port: int | None) -> dict[str, Any]:
    """Initialises torch.distributed if it is not yet, and makes the groups; collective over all ranks.

    Args:
        world: the job.
        backend: ``auto`` (gloo on CPU, nccl with one GPU for each local rank), ``gloo``, ``nccl``, or
            ``mpi``: gradients travel over MPI then, and the process groups, which torch from PyPI cannot
            build on MPI, are gloo's.
        port: of the store on rank 0's host, beside MPI; None picks a free one.

    Returns:
        Process groups by kind: WORLD, MP, DP, PP, TP, RDP.
    """
    if not dist.is_initialized():
        if backend == "auto":
            enough = torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size
            backend = "nccl" if enough else "gloo"
        if backend == "nccl" and not torch.cuda.is_available():
            raise SMPError("ddp_dist_backend='nccl' needs GPUs, and torch finds none: use 'gloo' or 'auto'")
        backend = "gloo" if backend == "mpi" else backend
        _init(world, backend, port)
    else:
        _check_ranks(world.rank, world.size)
    groups: dict[str, Any] = {"WORLD": dist.group.WORLD}
    made: dict[tuple[tuple[int, ...], ...], Any] = {}
    for kind in ("MP", "DP", "PP", "TP", "RDP"):
        rows = tuple(world.topology.groups(kind))
        if rows not in made:
            made[rows], _ = dist.new_subgroups_by_enumeration([list(row) for row in rows])
        groups[kind] = made[rows]
    return groups


def _init(world: World, backend: str, port: int | None) -> None:
    hosts = world.exchange(socket.gethostname(), "WORLD", "smp.init")
    one_machine = len(set(hosts)) == 1
    address = "127.0.0.1" if one_machine else hosts[0]
    _use_loopback(one_machine)
    if port is None and os.environ.get("MASTER_PORT", "").isdigit():
        port = int(os.environ["MASTER_PORT"])
    store = None
    problem = None
    if world.rank == 0:
        try:
            # Port 0 lets the system choose, which no other process can take in between.
            store = dist.TCPStore(address, port or 0, world.size, is_master=True, wait_for_workers=False)
        except Exception as error:
            problem = f"rank 0 cannot listen on port {port}: {error}. Set ddp_port to a free one"
    port, problem = world.exchange((store.port if store else None, problem), "WORLD", "smp.init store")[0]
    if problem:
        raise SMPError(problem)
    if store is None:
        assert port is not None
        store = dist.TCPStore(address, port, world.size, is_master=False)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=watchdog_s()),
    )


def init_gloo(store: dist.Store, rank: int, size: int, *, one_machine: bool) -> None:
    """Initialises torch.distributed, if it is not yet, on a store at which all ranks have met.

    Args:
        store: for this alone.
        rank: of this process.
        size: number of processes.
        one_machine: all of them share a machine.
    """
    if dist.is_initialized():
        return _check_ranks(rank, size)
    _use_loopback(one_machine)
    timeout = timedelta(seconds=watchdog_s())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _check_ranks(rank: int, size: int) -> None:
    """What the script has initialised must count as we do."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise SMPError(
            f"torch.distributed is initialised already, with rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but this is rank {rank} of {size}: let smp.init() initialise it, or "
            "use the same ranks"
        )


def new_gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group that nobody else uses; collective over its members.

    Its own timeout is far beyond the watchdog's: a wait of ours ends first, and says for whom it waited.
    """
    timeout = timedelta(seconds=max(2 * watchdog_s(), _LEAST_GROUP_TIMEOUT_S))
    return dist.new_group(list(ranks), timeout, backend="gloo", use_local_synchronization=True)


def _use_loopback(one_machine: bool) -> None:
    """gloo finds its address by the host's name, which need not resolve to one that works."""
    if one_machine and "GLOO_SOCKET_IFNAME" not in os.environ and _has_loopback():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def destroy_process_groups() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
