"""A collective that a rank has given up, to which its peer comes after all."""

from __future__ import annotations

import gc

import pytest
import torch

import smp_lite as smp
from smp_lite.comm import unawaited
from smp_lite.comm.collectives import Pending
from smp_lite.comm.waiting import wait_until
from smp_lite.session import current
from tests.harness import run_distributed

COUNT = 300_000


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_memory_is_nobody_elses_while_it_is_written_to(kind: str) -> None:
    (before, after, clean), (_, _, other) = run_distributed(
        "tests.transparency.failing.test_unawaited:give_up",
        2,
        kwargs={"kind": kind},
        parameters={"partitions": 2, "ddp": True},
    )
    assert before == 1 and after == 0
    assert clean and other


def give_up(kind: str) -> tuple[int, int, bool]:
    """On each rank: how many are left after rank 0 has given up and in the end, and whether memory that was
    taken anew is still what it was."""
    smp.init()
    try:
        world = current().world
        assert world is not None
        collectives = world.collectives("MP")

        def start(value: float) -> Pending:
            one, two = torch.full((COUNT,), value), torch.full((2, COUNT), value)
            if kind == "all_reduce":
                return collectives.all_reduce(one)
            if kind == "broadcast":
                return collectives.broadcast(one, root=1)
            if kind == "all_gather":
                return collectives.all_gather(one, two)
            if kind == "reduce_scatter":
                return collectives.reduce_scatter(two, one)
            return collectives.all_to_all(two, two.clone())

        before = list(unawaited._kept)  # other tests' ranks may have left some for ever

        def given_up() -> int:
            unawaited.let_go_of_ended()
            return len([item for item in unawaited._kept if all(item is not old for old in before)])

        left, taken = 0, []
        if smp.rank() == 0:
            start(1.0)
            gc.collect()
            left = given_up()
            taken = [torch.full((COUNT,), 5.0) for _ in range(8)]
            smp.barrier()
        else:
            smp.barrier()
            wait_until(start(2.0).done, lambda: "rank 0 to have begun it")
        smp.barrier()
        wait_until(lambda: not given_up(), lambda: "what was given up to end")
        return left, given_up(), all(bool((tensor == 5.0).all()) for tensor in taken)
    finally:
        smp.reset()
