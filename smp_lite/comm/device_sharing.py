"""Which devices let processes of one host read each other's memory, and how (CUDA: :mod:`.cuda_sharing`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["SHARED_BY", "Sharing", "cannot_share", "sharing_on"]


class Sharing(Protocol):
    """How processes of one host reach the memory and the events of each other's device.

    Attributes:
        name_bytes: length of what names a row of memory.
        handle_bytes: length of what names an event.
    """

    name_bytes: int
    handle_bytes: int

    def name(self, row: torch.Tensor) -> bytes:
        """Says to another process where the row is."""

    def copy(self, name: bytes, row: torch.Tensor) -> None:
        """Queues the copy of another process's row into this one, on the current stream.

        Raises:
            SMPError: the memory cannot be reached.
        """

    def event(self) -> Any:
        """One that other processes can wait for; it has ``record()``."""

    def handle(self, event: Any) -> bytes:
        """Says to another process which event is meant."""

    def wait(self, handle: bytes) -> None:
        """Lets the current stream wait for another process's event."""


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
