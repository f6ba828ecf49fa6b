"""What the harness's own tests run in the ranks."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from smp_lite.errors_record import record_failure


def rank_and_size() -> tuple[int, int, int]:
    """The rank, the world size, and the sum of all ranks by MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, world.size, world.allreduce(world.rank)


def process_id() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def parameters() -> str | None:
    return os.environ.get("SM_HP_MP_PARAMETERS")


def random_number() -> float:
    return random.random()


def set_variable(name: str) -> bool:
    """Whether the variable was set already; sets it."""
    was_set = name in os.environ
    os.environ[name] = "1"
    return was_set


def fail(failing_rank: int) -> None:
    """One rank raises, the others wait for it in MPI for ever."""
    from mpi4py import MPI

    print("words before the failure", flush=True)
    if MPI.COMM_WORLD.rank == failing_rank:
        raise RuntimeError("the cause")
    MPI.COMM_WORLD.Barrier()


def die(recorded: bool) -> None:
    """Rank 1 ends without a word, or with a failure record."""
    if rank_and_size()[0] == 1:
        if recorded:
            record_failure("the recorded cause\n", rank=1)
        os._exit(3)
    time.sleep(600)


def hang() -> None:
    if rank_and_size()[0] == 1:
        time.sleep(600)


def unpicklable() -> Any:
    return sys._getframe()


def tensor(scale: float) -> Any:
    import torch

    return torch.full((2, 3), scale)
