"""`smp.should_stop()`: one rank is told, all stop after the same step and can save."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from smp_lite.entrypoints.mpi.launch_plan import plan_mpirun
from smp_lite.entrypoints.mpi.mpirun import find_mpirun, stop_mpirun
from smp_lite.stop_notice import listen, stop_listening, was_given
from tests.api_support import batch, build, in_memory, train, wrap
from tests.harness import run_distributed
from tests.launch.launching import HANG_S, left_behind

CASES = "tests.launch.processes.cases:"
DDP = {"partitions": 2, "microbatches": 2, "ddp": True}


# In this process ------------------------------------------------------------------------------------------


def tell() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_notice_is_noted_and_stays() -> None:
    in_memory()
    assert not smp.should_stop()
    tell()
    assert [smp.should_stop() for _ in range(3)] == [True] * 3


def test_a_notice_before_init_counts_once_somebody_listens() -> None:
    listen()
    tell()
    in_memory()
    assert smp.should_stop()


def test_the_next_session_starts_without_notice_and_the_handler_goes_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    in_memory()
    tell()
    assert was_given()
    smp.reset()
    assert signal.getsignal(signal.SIGUSR1) == before
    in_memory()
    assert not smp.should_stop()
    smp.reset()


def test_a_handler_that_was_there_is_called_and_one_that_comes_later_wins() -> None:
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("earlier"))
    try:
        listen()
        tell()
        assert was_given() and called == ["earlier"]
        stop_listening()
        listen()
        signal.signal(signal.SIGUSR1, lambda *_: called.append("later"))
        tell()
        assert not was_given() and called == ["earlier", "later"]
    finally:
        stop_listening()
        signal.signal(signal.SIGUSR1, before)


def test_it_is_not_for_the_inside_of_a_step() -> None:
    in_memory()
    model, _ = wrap(build(), torch.optim.SGD)

    @smp.step
    def asks(model: Any, x: torch.Tensor) -> None:
        smp.should_stop()

    with pytest.raises(smp.SMPError, match="inside a step function: call it between steps"):
        asks(model, batch()[0])
    train(model, *batch())


def test_it_needs_init() -> None:
    with pytest.raises(smp.SMPError, match=r"call smp\.init\(\) first"):
        smp.should_stop()


# In the ranks of a job ------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [0, 3])
def test_all_ranks_stop_after_the_same_step(told: int) -> None:
    found = run_distributed(f"{CASES}stopped", 4, kwargs={"told": told}, parameters=DDP)
    assert found == [(3, [True, True]), (3, []), (3, []), (3, [])]


def test_a_rank_that_does_not_ask_is_named() -> None:
    found = run_distributed(f"{CASES}one_does_not_ask", 4, kwargs={"absent": 2}, parameters=DDP)
    for rank in (0, 1, 3):
        assert "smp.should_stop is collective over the WORLD group [0, 1, 2, 3]" in found[rank]
        assert re.search(r"rank\(s\) 2 did not call it", found[rank])


def test_signals_do_not_disturb_a_step() -> None:
    calm = run_distributed(f"{CASES}trained", 2, parameters={"partitions": 2, "microbatches": 2})
    wild = run_distributed(
        f"{CASES}trained_among_signals", 2, parameters={"partitions": 2, "microbatches": 2}
    )
    for (calm_losses, calm_state), (wild_losses, wild_state) in zip(calm, wild, strict=True):
        assert calm_losses == wild_losses
        assert all(torch.equal(calm_state[name], wild_state[name]) for name in calm_state)


# A script under mpirun --------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, smp_lite as smp

smp.init({"partitions": 2, "microbatches": 2})
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))

@smp.step
def train(model, x):
    model.backward(model(x).mean())

steps = 0
while not smp.should_stop():
    train(model, torch.ones(4, 4))
    steps += 1
    if steps == 1:
        sys.stdout.write(f"up {smp.rank()} {os.getpid()}\\n")
        sys.stdout.flush()
smp.save({"steps": steps}, sys.argv[1])
"""


@contextmanager
def mpirun(script: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Two ranks that have done their first step, and their process ids."""
    plan = plan_mpirun(
        processes=2,
        command=(sys.executable, str(script), *args),
        mpirun=find_mpirun(),
        environment={},
        is_root=os.geteuid() == 0,
    )
    environment = plan.full_environment(os.environ)
    with subprocess.Popen(plan.argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        pids: dict[str, int] = {}
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("up "):
                    _, rank, pid = line.split()
                    pids[rank] = int(pid)
                if len(pids) == 2:
                    break
            yield process, [pids["0"], pids["1"]]
        finally:
            if process.poll() is None:
                stop_mpirun(process, 5.0, pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mpirun", pytest.param("rank 1", marks=pytest.mark.thorough)])
def test_a_script_told_by_signal_saves_and_ends(tmp_path: Path, target: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with mpirun(script, str(tmp_path / "saved")) as (process, pids):
        os.kill(process.pid if target == "mpirun" else pids[1], signal.SIGUSR1)
        assert process.wait(HANG_S) == 0
    first, second = (torch.load(tmp_path / f"saved_{rank}") for rank in (0, 1))
    assert first == second
    assert first["steps"] >= 1
    assert left_behind(script) == []
