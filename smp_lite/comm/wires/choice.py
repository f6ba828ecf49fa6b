"""Which wire a job takes: ``SMP_LITE_WIRE``, or what suits the ranks and their device.

=========  ==========================================================================================
``mpi``    MPI. Tensors of a device go through the host's memory.
``c10d``   A torch process group. Tensors of a device go through the host's memory, unless
           the group carries them; then it is ``nccl``.
``ipc``    Ranks of one host read each other's memory on the device, or on several (:mod:`.mapped`).
``nccl``   Process groups that carry tensors of the device (:mod:`.grouped`): one for each rank.
=========  ==========================================================================================

Without the variable: for tensors of the host ``mpi`` in an MPI job, else ``c10d``; for those of a device the
first of ``ipc``, ``nccl`` and the host's that all ranks of a pipeline can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ...devices import is_host
from ...errors import SMPError
from ..groups.world import World
from ..on_device.groups import carries
from ..on_device.sharing import sharing_on
from .announced import AnnouncedWire
from .c10d import C10dWire
from .grouped import GroupedCarrier
from .mapped import MappedCarrier
from .mpi import MPIWire
from .staged import StagedWire
from .wire import Wire

__all__ = ["WIRE_VARIABLE", "Kind", "choose_wire", "described", "make_wire", "wanted_kind"]

WIRE_VARIABLE = "SMP_LITE_WIRE"
"""One of the kinds: what tensors travel over between stages."""

Kind = Literal["mpi", "c10d", "ipc", "nccl"]


def wanted_kind(environment: Mapping[str, str]) -> str | None:
    """What the variable says; None: nothing.

    Raises:
        SMPError: it names no kind.
    """
    wanted = environment.get(WIRE_VARIABLE)
    if wanted is not None and wanted not in get_args(Kind):
        raise SMPError(
            f"{WIRE_VARIABLE}={wanted!r}: it must be one of {', '.join(map(repr, get_args(Kind)))}"
        )
    return wanted


def choose_wire(environment: Mapping[str, str], world: World, group: Any, device: torch.device) -> Kind:
    """The kind of the job's wire; collective over each pipeline where the device is not the host's.

    Args:
        environment: with the variable, or without.
        world: the job.
        group: the pp group's process group; None: there is none (no ``ddp: True``).
        device: where the tensors are.

    Raises:
        SMPError: the variable names no kind, or one that the job cannot have.
    """
    has_mpi = world.transport.has_mpi
    wanted = wanted_kind(environment)
    problems: dict[str, str] = {}
    if not has_mpi:
        problems["mpi"] = "the job runs without MPI: unset it, or use mpirun"
    elif group is None:
        problems["c10d"] = "it needs ddp: True in the parameters"
    if is_host(device):
        problems["ipc"] = problems["nccl"] = "tensors are the host's, there is no other device"
    else:
        _problems_of_devices(problems, world, group, device)
    if wanted is not None:
        if wanted in problems:
            raise SMPError(f"{WIRE_VARIABLE}={wanted}: {problems[wanted]}")
        kind = wanted
    else:
        order = ("ipc", "nccl", "mpi", "c10d")
        kind = next(kind for kind in order if kind not in problems)
    if kind == "c10d" and not is_host(device) and carries(group, device):
        kind = "nccl"
    return kind  # type: ignore[return-value]


def _problems_of_devices(problems: dict[str, str], world: World, group: Any, device: torch.device) -> None:
    """Why the pipeline's ranks cannot have what goes from device to device: the same on all of them."""
    if why := world.why_no_common_memory("PP"):
        problems["ipc"] = why
    if group is None:
        problems["nccl"] = "it needs ddp: True in the parameters"
    elif not carries(group, device):
        problems["nccl"] = (
            f"the process groups are {dist.get_backend(group)}'s, which do not carry tensors of "
            f"{device.type}: it needs a device for each rank, and ddp_dist_backend: 'auto' or 'nccl'"
        )


def make_wire(
    kind: Kind, world: World, rank_of_stage: Sequence[int], group: Any, device: torch.device
) -> Wire:
    """The wire between the stages of the pp group; collective over it.

    Args:
        kind: see :func:`choose_wire`.
        world: the job.
        rank_of_stage: for each stage the group rank that holds it.
        group: the pp group's process group; None: there is none.
        device: where the tensors are.
    """
    if kind == "ipc":
        carrier = MappedCarrier(sharing_on(device), _host_wire(world, rank_of_stage))
        return AnnouncedWire(_host_wire(world, rank_of_stage), carrier)
    if kind == "nccl":
        stage_index = rank_of_stage.index(world.group_rank("PP"))
        ranks = list(world.group("PP"))
        onward, back = (_group_like(group, ranks) for _ in range(2))
        carried = GroupedCarrier(onward, back, stage_index, rank_of_stage, device)
        return AnnouncedWire(_host_wire(world, rank_of_stage), carried)
    if kind == "c10d" and world.transport.has_mpi:
        wire: Wire = C10dWire(group, rank_of_stage)
    else:
        wire = _host_wire(world, rank_of_stage)
    return wire if is_host(device) else StagedWire(wire)


def _host_wire(world: World, rank_of_stage: Sequence[int]) -> Wire:
    """A wire of its own for tensors of the host."""
    group = world.new_group("PP")
    return (MPIWire if world.transport.has_mpi else C10dWire)(group, rank_of_stage)


def _group_like(group: Any, ranks: list[int]) -> Any:
    """Another process group of the same ranks and backend; only they take part."""
    return dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)


def described(kind: Kind, device: torch.device) -> str:
    """For the log's first lines."""
    if is_host(device) or kind in ("ipc", "nccl"):
        return f"wire {kind}"
    return f"wire {kind}, through the host's memory"
