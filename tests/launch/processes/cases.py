"""What the harness's own tests run in the ranks."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
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


def trained(num_steps: int = 3) -> tuple[list[str], dict[str, Any]]:
    """The losses of this rank's replica, exact as text, and the state that all ranks come to."""
    import smp_lite as smp
    from tests.api_support import batch, build, train, wrap

    smp.init()
    model, optimizer = wrap(build(), _adamw)
    losses = []
    for index in range(num_steps):
        optimizer.zero_grad()
        losses.append(train(model, *batch(index + 100 * smp.dp_rank())).reduce_mean().item().hex())
        optimizer.step()
    return losses, model.state_dict()


def _adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=0.01)


def local_ranks(hosts: list[str]) -> tuple[int, int]:
    """The local rank and size, where this machine plays several hosts and the launcher tells neither."""
    import smp_lite as smp

    os.environ["SM_CURRENT_HOST"] = hosts[int(os.environ.get("RANK") or rank_and_size()[0])]
    os.environ.pop("LOCAL_RANK", None)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    smp.init()
    return smp.local_rank(), smp.local_size()


def stopped(told: int) -> tuple[int, list[bool]]:
    """Trains until one rank is told to stop in its third step.

    Returns:
        The steps done, and the answers to later questions, which only rank 0 asks.
    """
    import smp_lite as smp
    from tests.api_support import batch, build, train, wrap

    smp.init()
    model, _ = wrap(build(), _adamw)
    for step in range(50):
        train(model, *batch(step))
        if step == 2 and smp.rank() == told:
            os.kill(os.getpid(), signal.SIGUSR1)
        if smp.should_stop():
            return step + 1, [smp.should_stop() for _ in range(2) if smp.rank() == 0]
    return 50, []


def trained_among_signals() -> tuple[list[str], dict[str, Any]]:
    """As :func:`trained`, while this process gets one signal after another."""
    over = threading.Event()

    def signals() -> None:
        while not over.wait(0.0005):
            os.kill(os.getpid(), signal.SIGUSR1)

    from smp_lite.stop_notice import listen

    listen()
    thread = threading.Thread(target=signals)
    thread.start()
    try:
        return trained()
    finally:
        over.set()
        thread.join()


def one_does_not_ask(absent: int) -> str:
    """What `should_stop` says where one rank does not call it."""
    import smp_lite as smp

    smp.init()
    if smp.rank() == absent:
        return ""
    smp.set_watchdog(0.5)
    try:
        smp.should_stop()
    except smp.SMPTimeout as error:
        return str(error)
    finally:
        smp.set_watchdog(None)
    return "no error"


def large_objects() -> list[tuple[int, bytes]]:
    """Length and end of objects that are gathered, too large for one message to torch's TCPStore."""
    import smp_lite as smp

    smp.init()
    mine = b"x" * (9 << 20) + bytes([smp.rank()])
    return [(len(data), data[-2:]) for data in smp.allgather(mine, smp.MP_GROUP)]
