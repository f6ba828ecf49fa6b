"""What all ranks must have been given alike, compared once, when a session begins.

Ranks that plan by different parameters, or talk in other ways, would wait for each other, or take one value
for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ..comm.groups.world import World
from ..comm.wires.choice import WIRE_VARIABLE
from ..config import Config
from ..devices import DEVICE_VARIABLE
from ..errors import SMPMismatch

__all__ = ["check_alike"]

_MAY_DIFFER = frozenset({"partition_file", "ddp_port"})
"""Parameters of which rank 0's counts, or that name a place on a rank's own host."""


def check_alike(world: World, config: Config, device: torch.device, environment: Mapping[str, str]) -> None:
    """Collective over the world.

    Args:
        world: the job.
        config: this rank's parameters.
        device: this rank's; its number may differ.
        environment: the process's.

    Raises:
        SMPMismatch: the parameters are not the same on all ranks, or the wire, or the kind of device.
    """
    parameters = {key: repr(value) for key, value in config.model_dump().items() if key not in _MAY_DIFFER}
    around = {
        WIRE_VARIABLE: environment.get(WIRE_VARIABLE, "not set"),
        f"the device ({DEVICE_VARIABLE} sets it)": device.type,
    }
    mine = parameters | around
    digests = world.exchange(hashlib.sha256(repr(mine).encode()).digest(), "WORLD", "smp.init")
    if len(set(digests)) == 1:
        return
    first, *others = world.exchange(mine, "WORLD", "smp.init's parameters")
    for rank, theirs in enumerate(others, start=1):
        for key, value in theirs.items():
            if value != first.get(key):
                way_out = "it has to be the same" if key in around else "give smp.init the same parameters"
                raise SMPMismatch(
                    f"{key} is {value} on rank {rank} and {first.get(key)} on rank 0: {way_out} on all ranks"
                )
