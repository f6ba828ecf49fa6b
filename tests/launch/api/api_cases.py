"""What the tests of the public functions run in the ranks: ranks, groups and messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import smp_lite as smp

_KINDS = ("mp", "dp", "pp", "tp", "rdp")
_GROUPS = {
    "world": smp.WORLD,
    "mp": smp.MP_GROUP,
    "dp": smp.DP_GROUP,
    "pp": smp.PP_GROUP,
    "tp": smp.TP_GROUP,
    "rdp": smp.RDP_GROUP,
}


def getters() -> dict[str, Any]:
    """Everything that a rank knows of itself."""
    before = smp.is_initialized()
    smp.init()
    found: dict[str, Any] = {
        "initialized": (before, smp.is_initialized()),
        "rank": (smp.rank(), smp.size()),
        "local": (smp.local_rank(), smp.local_size()),
        "tracing": smp.is_tracing(),
    }
    for kind in _KINDS:
        found[kind] = (getattr(smp, f"{kind}_rank")(), getattr(smp, f"{kind}_size")())
        found[f"{kind}_group"] = getattr(smp, f"get_{kind}_group")()
    return found


def groups_at_work() -> dict[str, tuple[list[int], list[int]]]:
    """For each group: (world ranks in the process group, world ranks gathered), by two ways."""
    smp.init()
    found = {}
    for kind, group in _GROUPS.items():
        process_group = getattr(smp, f"get_{kind}_process_group")()
        mine = torch.zeros(smp.size(), dtype=torch.int64)
        mine[smp.rank()] = 1
        dist.all_reduce(mine, group=process_group)
        found[kind] = mine.nonzero().flatten().tolist(), smp.allgather(smp.rank(), group)
        smp.barrier(group)
    smp.barrier()
    for kind in _KINDS:
        getattr(smp, f"{kind}_barrier")()
    return found


def process_groups_without_ddp() -> str:
    smp.init()
    return error_of(smp.get_dp_process_group)


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of the exception that a call raises; empty if it returns."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gathered() -> list[Any]:
    """`allgather` of what a script may pass, in its positional and keyword forms."""
    smp.init()
    me = smp.rank()
    values = [
        smp.allgather(me),
        smp.allgather({"rank": me}, smp.MP_GROUP),
        smp.allgather(None, group=smp.CommGroup.WORLD),
        smp.allgather(torch.full((2,), float(me)), group=smp.DP_GROUP),
        smp.allgather([torch.tensor(me, dtype=torch.bfloat16), "x" * 100_000]),
    ]
    smp.barrier(group=smp.CommGroup.DP_GROUP)
    return values


def messages() -> list[Any]:
    """What each rank received; 4 ranks, 2 partitions, cluster: mp groups [0, 1] and [2, 3]."""
    smp.init()
    me = smp.rank()
    received: list[Any] = []
    parcels = [None, 3, {"a": [torch.arange(3), None]}, torch.ones(300_000), "text", ()]
    # Within mp groups, by mp rank, first positionally, then by keyword.
    for parcel in parcels:
        if smp.mp_rank() == 0:
            smp.send((me, parcel), 1, smp.RankType.MP_RANK)
            received.append(smp.recv_from(src_rank=1, rank_type=smp.RankType.MP_RANK))
        else:
            received.append(smp.recv_from(0, smp.RankType.MP_RANK))
            smp.send(obj=(me, parcel), dest_rank=0, rank_type=smp.RankType.MP_RANK)
    # A ring over the world: world rank is the default.
    if me == 0:
        smp.send("ring", 1)
    received.append(smp.recv_from((me - 1) % smp.size()))
    if me != 0:
        smp.send(received[-1] + str(me), (me + 1) % smp.size())
    # Only the sender of a broadcast calls it.
    if me == 2:
        smp.broadcast({"from": me})
        received.append({"from": me})
    else:
        received.append(smp.recv_from(2, smp.RankType.WORLD_RANK))
    if smp.dp_rank() == 1:
        smp.broadcast(torch.tensor([me]), group=smp.DP_GROUP)
    else:
        received.append(smp.recv_from(1, rank_type=smp.RankType.DP_RANK))
    smp.broadcast("to nobody", smp.TP_GROUP)
    smp.barrier()
    return received


def overtaking() -> list[str]:
    """Messages of one sender keep their order, and a collective call does not swallow them."""
    smp.init()
    if smp.rank() == 0:
        smp.allgather("collective")
        smp.send("first", 1)
        smp.send("second", 1)
        return []
    smp.allgather("collective")
    smp.barrier(smp.TP_GROUP)
    return [smp.recv_from(0), smp.recv_from(0)]


def mistakes() -> dict[str, str]:
    """Errors of wrong arguments; nothing is sent, so no rank waits."""
    smp.init()
    wrong: Any = "MP"
    return {
        "no such rank": error_of(lambda: smp.send(1, 7)),
        "no such mp rank": error_of(lambda: smp.recv_from(2, smp.RankType.MP_RANK)),
        "negative": error_of(lambda: smp.send(1, -1, smp.RankType.DP_RANK)),
        "itself": error_of(lambda: smp.send(1, smp.rank())),
        "group": error_of(lambda: smp.allgather(1, wrong)),
        "rank type": error_of(lambda: smp.send(1, 0, wrong)),
        "again": error_of(lambda: smp.init({"partitions": 99})),
    }


def one_process() -> dict[str, Any]:
    """A world of one process: the same script, nobody to talk to."""
    smp.init()
    smp.barrier()
    smp.broadcast("x")
    return {
        "sizes": [smp.size(), smp.mp_size(), smp.dp_size()],
        "gathered": smp.allgather("x", smp.MP_GROUP),
        "send": error_of(lambda: smp.send(1, 0)),
    }


def init_error() -> str:
    return error_of(smp.init)


def differing_parameters() -> str:
    """What smp.init says where ranks give it other parameters."""
    pipeline = "simple" if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1 else "zero_bubble"
    return _said_of({"partitions": 2, "pipeline": pipeline})


def differing_wires() -> str:
    """The same where they are to talk by other wires."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.environ["SMP_LITE_WIRE"] = "c10d"
    return _said_of({"partitions": 2, "ddp": True})


def _said_of(parameters: dict[str, Any]) -> str:
    try:
        smp.init(parameters)
    except smp.SMPMismatch as error:
        return str(error)
    return "nothing was raised"
