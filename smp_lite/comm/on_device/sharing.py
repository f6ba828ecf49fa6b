"""Which devices let processes of one host read each other's memory, and how (CUDA: :mod:`.cuda_sharing`).

What a device says of itself does not settle it: containers, virtual machines and the kind of bus have a part
in it, and with one visible device for each process there is nothing to ask. So it is tried, once for each
group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ...devices import home, record, synchronize
from ...errors import SMPError

__all__ = ["SHARED_BY", "Sharing", "cannot_share", "sharing_on", "why_not_between"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TRIED_BYTES = 64


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
        """One that other processes can wait for, to be recorded in a stream."""

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


def why_not_between(group_rank: int, local_size: int, exchange: Callable[[Any], list[Any]]) -> str:
    """Why the members of a group cannot read each other's memory, the same on all of them; "": they can.

    Collective over the group.

    Args:
        group_rank: this one's place in it.
        local_size: number of ranks on this host.
        exchange: what each member gives, in order, on all of them.
    """
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""  # names of hosts may be alike
    found = exchange((socket.gethostname(), boot, cannot_share(home(), local_size)))
    hosts = {(host, boot) for host, boot, _ in found}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts: leave it out, or set it to nccl"
    if why := next((why for _, _, why in found if why), ""):
        return str(why)
    return _try(sharing_on(home()), group_rank, exchange) if len(found) > 1 else ""


def _try(sharing: Sharing, group_rank: int, exchange: Callable[[Any], list[Any]]) -> str:
    """Each reads a row of each other's into one of zeros, which is nobody's."""
    row = torch.full((_TRIED_BYTES,), 1 + group_rank % 251, dtype=torch.uint8, device=home())
    event, problem = None, ""
    mine: tuple[bytes, bytes, str] = b"", b"", ""
    try:
        event = sharing.event()
        record(event)
        mine = sharing.name(row), sharing.handle(event), ""
    except (SMPError, RuntimeError) as error:
        mine = b"", b"", f"it was tried, and {error}"
    offered = exchange(mine)
    if why := next((why for *_, why in offered if why), ""):
        return str(why)
    try:
        for other, (name, handle, _) in enumerate(offered):
            if other == group_rank:
                continue
            into = torch.zeros_like(row)
            sharing.wait(handle)
            sharing.copy(name, into)
            if into.tolist() != [1 + other % 251] * _TRIED_BYTES:
                problem = f"it was tried, and the memory of rank {other} of the group held other numbers"
    except (SMPError, RuntimeError) as error:
        problem = f"it was tried, and {error}"
    synchronize()
    tried = exchange(problem)  # nobody lets go of its row before all have read it
    return next((why for why in tried if why), "")


def _load() -> None:
    from . import cuda_sharing

    SHARED_BY.setdefault(cuda_sharing.TYPE, (cuda_sharing.cannot_share, cuda_sharing.CudaSharing))
