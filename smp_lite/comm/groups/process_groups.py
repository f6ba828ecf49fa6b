"""The job's groups in torch.distributed: what ``ddp: True`` and ``smp.get_dp_process_group()`` need.

Beside MPI, rank 0 offers a store on a free port (``ddp_port`` or ``MASTER_PORT`` if given) and tells the
others by MPI, so nothing has to be set by hand and two jobs on one host do not meet. Without MPI the ranks
have met at a store already (:mod:`smp_lite.comm.transports.store`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...devices import is_host, physical
from ...errors import SMPError
from ...smp_v1 import cuda_as_cpu
from ..on_device.groups import carries, decide, unavailable
from ..transports.gloo import check_ranks, group_timeout, init_gloo, use_loopback
from ..waiting import watchdog_s
from .world import World

__all__ = ["groups_of_one_process", "init_process_groups"]


def init_process_groups(
    world: World, *, backend: str, port: int | None, device: torch.device
) -> dict[str, Any]:
    """Initialises torch.distributed if it is not yet, and makes the groups; collective over all ranks.

    Tensors of the host go by gloo. Where each rank of a group has a device of its own, and torch a backend
    for these (NCCL), tensors of devices go by that.

    Args:
        world: the job; it is told which groups of ranks can have groups for tensors of devices.
        backend: ``auto``, ``gloo``, ``nccl`` (what is on devices must go by their backend), or
            ``mpi``: gradients travel over MPI then, and the process groups, which torch from PyPI cannot
            build on MPI, are gloo's.
        device: of this process.
        port: of the store on rank 0's host, beside MPI; None picks a free one.

    Returns:
        Process groups by kind: WORLD, MP, DP, PP, TP, RDP; with sharded parameters of SMP, SDP.

    Raises:
        SMPError: ``nccl`` cannot be.
    """
    if cuda_as_cpu.is_on() and backend == "nccl":
        backend = "gloo"
    if is_host(device):
        if backend == "nccl":
            raise SMPError("ddp_dist_backend='nccl' needs GPUs, and torch finds none: use 'gloo' or 'auto'")
    else:
        said = world.exchange((physical(device), unavailable(device)), "WORLD", "smp.init devices")
        world.device_groups = decide(backend, device, said)

    def backends(ranks: Sequence[int]) -> str:
        return "gloo" if world.device_groups is None else world.device_groups.backends(ranks)

    everybody = tuple(range(world.size))
    if not dist.is_initialized():
        _init(world, backends(everybody), port)
    else:
        check_ranks(world.rank, world.size)
    made: dict[tuple[tuple[int, ...], ...], Any] = {}

    def group_of(rows: Sequence[tuple[int, ...]]) -> Any:
        """This rank's, of these rows of world ranks; all ranks make all of them."""
        key = tuple(rows)
        if key not in made:
            found = [dist.new_group(list(row), group_timeout(), backend=backends(row)) for row in key]
            made[key] = next(group for group, row in zip(found, key, strict=True) if world.rank in row)
        return made[key]

    # Who has initialised it need not have thought of devices.
    may_stay = backends(everybody) == "gloo" or carries(dist.group.WORLD, device)
    groups: dict[str, Any] = {"WORLD": dist.group.WORLD if may_stay else group_of([everybody])}
    kinds = dict(world.topology.kinds)
    for kind in ("MP", "DP", "PP", "TP", "RDP", *(["SDP"] if "SDP" in kinds else [])):
        groups[kind] = group_of(world.topology.groups(kind))
    return groups


def groups_of_one_process() -> dict[str, Any]:
    """The same where one process plays all stages: every group is that process."""
    init_gloo(dist.HashStore(), 0, 1, one_machine=True)
    return dict.fromkeys(("WORLD", "MP", "DP", "PP", "TP", "RDP"), dist.group.WORLD)


def _init(world: World, backends: str, port: int | None) -> None:
    hosts = world.exchange(socket.gethostname(), "WORLD", "smp.init")
    one_machine = len(set(hosts)) == 1
    address = "127.0.0.1" if one_machine else hosts[0]
    use_loopback(one_machine)
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
    said = (store.port if store else None, problem) if world.rank == 0 else None
    port, problem = world.exchange(said, "WORLD", "smp.init store")[0]
    if problem:
        raise SMPError(problem)
    if store is None:
        assert port is not None
        store = dist.TCPStore(address, port, world.size, is_master=False)
    dist.init_process_group(
        backends,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=watchdog_s()),
    )
