"""Which devices let processes of one host read each other's memory, and how."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .mapped import Sharing

__all__ = ["SHARED_BY", "cannot_share", "sharing_on"]

#: For a type of device: why ranks that share this host's devices cannot read each other's memory ("": they
#: can), given this rank's device and how many ranks the host has; and what does it then.
SHARED_BY: dict[str, tuple[Callable[[torch.device, int], str], Callable[[], Sharing]]] = {}


def cannot_share(device: torch.device, local_size: int) -> str:
    """Why not; "": the device can."""
    _load()
    if device.type not in SHARED_BY:
        return f"devices of type {device.type!r} offer no memory that other processes read"
    return SHARED_BY[device.type][0](device, local_size)


def sharing_on(device: torch.device) -> Sharing:
    """What :func:`cannot_share` has found nothing against."""
    return SHARED_BY[device.type][1]()


def _load() -> None:
    from . import cuda_sharing

    SHARED_BY.setdefault(cuda_sharing.TYPE, (cuda_sharing.cannot_share, cuda_sharing.CudaSharing))
