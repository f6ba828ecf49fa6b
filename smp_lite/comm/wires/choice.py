"""Which wire a job takes: ``SMP_LITE_WIRE``, or what suits the ranks and their device.

``mpi`` and ``c10d`` carry the host's memory; tensors of a device go through it, except over a process group
whose backend carries the device's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...devices import is_host
from ...errors import SMPError
from ..world import World
from .c10d import C10dWire
from .mpi import MPIWire
from .staged import StagedWire
from .wire import Wire

__all__ = ["WIRE_VARIABLE", "carries", "described", "make_wire", "wire_kind"]

WIRE_VARIABLE = "SMP_LITE_WIRE"
"""``mpi`` (the default in an MPI job) or ``c10d``: what tensors travel over between stages."""

_KINDS = ("mpi", "c10d")


def wire_kind(environment: Mapping[str, str], *, has_mpi: bool, has_groups: bool) -> str:
    """The kind of the job's wire.

    Args:
        environment: with the variable, or without.
        has_mpi: the ranks are an MPI job's.
        has_groups: there are process groups (``ddp: True``).

    Raises:
        SMPError: the variable names no kind, or one that the job cannot have.
    """
    kind = environment.get(WIRE_VARIABLE, "mpi" if has_mpi else "c10d")
    if kind not in _KINDS:
        raise SMPError(f"{WIRE_VARIABLE}={kind!r}: it must be {' or '.join(map(repr, _KINDS))}")
    if kind == "mpi" and not has_mpi:
        raise SMPError(f"{WIRE_VARIABLE}=mpi, but the job runs without MPI: unset it, or use mpirun")
    if kind == "c10d" and has_mpi and not has_groups:
        raise SMPError(f"{WIRE_VARIABLE}=c10d needs ddp: True in the parameters")
    return kind


def make_wire(
    kind: str, world: World, rank_of_stage: Sequence[int], group: Any, device: torch.device
) -> Wire:
    """The wire between the stages of the pp group; collective over it.

    Args:
        kind: see :func:`wire_kind`.
        world: the job.
        rank_of_stage: for each stage the group rank that holds it.
        group: the pp group's process group; None: there is none.
        device: where the tensors are.
    """
    if kind == "mpi":
        return _staged(MPIWire(world.new_group("PP"), rank_of_stage), is_host(device))
    if not world.transport.has_mpi:
        group = world.new_group("PP")  # of its own
    return _staged(C10dWire(group, rank_of_stage), carries(group, device))


def _staged(wire: Wire, carries_it: bool) -> Wire:
    return wire if carries_it else StagedWire(wire)


def carries(group: Any, device: torch.device) -> bool:
    """Whether a process group's backend reads and writes tensors of the device themselves."""
    return is_host(device) or dist.get_backend(group) != "gloo"


def described(kind: str, group: Any, device: torch.device) -> str:
    """For the log's first lines."""
    has_group = group is not None and kind == "c10d"
    if is_host(device) or (has_group and carries(group, device)):
        return f"wire {kind}"
    return f"wire {kind}, through the host's memory"
