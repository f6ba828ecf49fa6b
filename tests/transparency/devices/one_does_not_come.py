"""A script: one rank's device waits for a collective that the other rank never queues."""

from __future__ import annotations

import time

import torch

import smp_lite as smp
from smp_lite.session import current
from tests.pretended_device.backend import install
from tests.pretended_device.groups import offered

install()
with offered():
    smp.init({"partitions": 1, "ddp": True})
world = current().world
assert world is not None
collectives = world.collectives("DP")
tensor = torch.ones(3, device=smp.state.device)
collectives.all_reduce(tensor).done()
print(f"rank {smp.rank()} has {tensor.tolist()}", flush=True)
if smp.rank() == 0:
    assert collectives.all_reduce(tensor).done()
    print(tensor.tolist())
else:
    time.sleep(600)
