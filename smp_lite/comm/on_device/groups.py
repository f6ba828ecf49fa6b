"""Which ranks can have process groups that carry tensors of their devices, and such groups.

A backend of that kind (NCCL) takes one rank for each device. So a group of ranks has one where each of its
members has a device of its own. What tells devices apart is what they are, not their numbers: ranks in
containers of one machine may each call the same device their first. Everybody knows of everybody, so all
members of a group decide alike.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...devices import CPU, is_host
from ...errors import SMPError
from ..transports.gloo import group_timeout

__all__ = ["DeviceGroups", "abort", "carries", "decide", "unavailable"]

_ERROR_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def carries(group: Any, device: torch.device) -> bool:
    """Whether a process group reads and writes tensors of the device themselves."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return is_host(device) or backends.get(device.type, "gloo") != "gloo"


class DeviceGroups:
    """Of one job.

    Args:
        backend: torch's name of what carries tensors of the device.
        device: of this process; its type is that of all ranks.
        owned: for each world rank what tells its device from others.
    """

    def __init__(self, backend: str, device: torch.device, owned: Sequence[str]) -> None:
        self.backend, self._owned = backend, owned
        self._both = f"{CPU.type}:gloo,{device.type}:{backend}"

    def can_join(self, ranks: Sequence[int]) -> bool:
        """Whether each of these world ranks has a device of its own."""
        return len({self._owned[rank] for rank in ranks}) == len(ranks)

    def backends(self, ranks: Sequence[int]) -> str:
        """For a process group that scripts use too: tensors of the host go by gloo."""
        return self._both if self.can_join(ranks) else "gloo"

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A process group for tensors of devices that nobody else uses; collective over its members."""
        return dist.new_group(
            list(ranks), group_timeout(), backend=self.backend, use_local_synchronization=True
        )


def unavailable(device: torch.device) -> str:
    """Why this process has no backend for tensors of the device; "": it has."""
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if not hasattr(dist.ProcessGroup, "abort"):
        return f"torch {torch.__version__} cannot give up what a process group has under way"
    if backend in (None, "gloo"):
        return f"torch knows no backend for devices of type {device.type!r}"
    return "" if dist.is_backend_available(str(backend)) else f"torch is built without {backend} here"


def decide(wanted: str, device: torch.device, said: Sequence[tuple[str, str]]) -> DeviceGroups | None:
    """What groups of ranks can have; None: nothing, so what is on devices takes another way.

    Args:
        wanted: ``ddp_dist_backend``: ``nccl`` means what carries tensors of the device, and nothing else.
        device: of this process, which is not the host.
        said: by each rank, what tells its device from others, and why it has no backend.

    Raises:
        SMPError: it is wanted, and cannot be; on all ranks.
    """
    owned = [own for own, _ in said]
    problem = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text), "")
    if wanted == "nccl" and not problem:
        first = next((own for own in owned if owned.count(own) > 1), None)
        if first is not None:
            sharing = ", ".join(str(rank) for rank, own in enumerate(owned) if own == first)
            problem = (
                f"ranks {sharing} share {first}, and it takes one rank for each device: start no more ranks "
                "than there are devices"
            )
    if problem and wanted == "nccl":
        raise SMPError(f"ddp_dist_backend='nccl': {problem}, or use 'auto', which takes what there is")
    if problem or wanted in ("gloo", "mpi"):
        return None
    # A group of which a member has failed is aborted, and the job goes on; torch's own way would end it.
    os.environ.setdefault(_ERROR_VARIABLE, "0")
    return DeviceGroups(dist.Backend.default_device_backend_map[device.type], device, owned)


def abort(group: Any) -> None:
    """Ends what a group of :meth:`DeviceGroups.new_group` has under way; it is of no use afterwards."""
    with contextlib.suppress(Exception):  # of a group that has failed already
        group.abort()
