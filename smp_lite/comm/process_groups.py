"""torch.distributed beside MPI: needed for ``ddp: True`` and for ``smp.get_dp_process_group()``.

Rank 0 offers a store on a free port (``ddp_port`` or ``MASTER_PORT`` if given) and tells the others by
MPI, so nothing has to be set by hand and two jobs on one host do not meet.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SMPError
from .waiting import watchdog_s
from .world import World


def init_process_groups(world: World, *, backend: str, port: int | None) -> dict[str, Any]:
    """Initialises torch.distributed if it is not yet, and makes the groups; collective over all ranks.

    Args:
        world: the job.
        backend: ``auto`` (gloo on CPU, nccl with one GPU for each local rank), ``gloo``, ``nccl``, or
            ``mpi``: gradients travel over MPI then, and the process groups, which torch from PyPI cannot
            build on MPI, are gloo's.
        port: of the store on rank 0's host; None picks a free one.

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
    elif (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise SMPError(
            f"torch.distributed is initialised already, with rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but MPI says rank {world.rank} of {world.size}: "
            "let smp.init() initialise it, or use the same ranks"
        )
    groups: dict[str, Any] = {"WORLD": dist.group.WORLD}
    made: dict[tuple[tuple[int, ...], ...], Any] = {}
    for kind in ("MP", "DP", "PP", "TP", "RDP"):
        rows = tuple(world.topology.groups(kind))
        if rows not in made:
            made[rows], _ = dist.new_subgroups_by_enumeration([list(row) for row in rows])
        groups[kind] = made[rows]
    return groups


def _init(world: World, backend: str, port: int | None) -> None:
    hosts = world.exchange(world.host_name(), "WORLD", "smp.init")
    one_host = len(set(hosts)) == 1
    address = "127.0.0.1" if one_host else hosts[0]
    if one_host and "GLOO_SOCKET_IFNAME" not in os.environ and _has_loopback():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def destroy_process_groups() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
