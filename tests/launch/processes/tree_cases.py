"""What runs in the ranks of small groups that are made to talk in trees."""

from __future__ import annotations

import re
from typing import Any

import smp_lite as smp
from tests.launch.api.api_cases import error_of

LARGE = 100_000


def _world() -> Any:
    smp.init()
    world = smp.state.world
    world.barrier()
    world.calls.radix = 2
    return world


def trees() -> list[Any]:
    """What each collective gives, one after another over several groups, and what a different one raises."""
    world = _world()
    me = world.rank
    found: list[Any] = []
    for turn in range(20):
        for kind in ("WORLD", "MP", "DP", "WORLD"):
            found.append(world.exchange((turn, me), kind, "turn"))
        world.barrier()
    found.append(world.gather(me, "WORLD", "small"))
    found.append(world.gather(bytes([me]) * (LARGE if me % 2 else 1), "WORLD", "some large"))
    found.append(world.exchange("said" if me == world.size - 1 else None, "WORLD", "of the last"))
    found.append([part[-1] for part in world.exchange(b"x" * (9 << 20) + bytes([me]), "WORLD", "large")])
    error = error_of(lambda: world.exchange(0, "WORLD", "left" if me == 1 else "right"))
    # Which of the others rank 1 hears of first depends on the moment.
    found.append(re.sub(r"but rank \d ", "but another ", error) if me == 1 else error)
    found.append(world.exchange(me, "WORLD", "after it"))
    return found


def missing(absent: int) -> str:
    """What the others say of a rank that does not call."""
    world = _world()
    found = ""
    if world.rank != absent:
        smp.set_watchdog(1.0 if world.rank == 1 else 60.0)
        found = error_of(lambda: world.exchange(None, "WORLD", "the call"))
        smp.set_watchdog(None)
    return found
