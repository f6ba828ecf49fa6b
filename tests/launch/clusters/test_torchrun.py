"""The same scripts without MPI: under torchrun, started by hand, and in one process.

What the ranks of an MPI job do and find, those of torchrun must do and find as well, so one launch of
torchrun makes many calls, and each is compared with the same call on MPI. There `mpi4py` is a module that
fails as it does where no MPI library is installed.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.api_support import same
from tests.harness import run_distributed
from tests.launch.launching import left_behind
from tests.transparency.comparison import NUM_MICROBATCHES

REPOSITORY = Path(__file__).parents[3]
HANG_S = 90.0
"""A bound against hanging; a launch takes five to ten seconds."""

NO_MPI = "raise RuntimeError('cannot load MPI library')\n"


@pytest.fixture(scope="module")
def no_mpi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without launcher and without MPI library."""
    folder = tmp_path_factory.mktemp("no_mpi")
    (folder / "mpi4py.py").write_text(NO_MPI)
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


pytestmark = pytest.mark.timeout(600)


def torchrun(
    num_ranks: int, script: Path, *args: str, env: Mapping[str, str], limit_s: float = HANG_S
) -> tuple[int, str]:
    """Runs a script under torchrun to its end; exit code and stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return finish([start([*command, str(script), *args], env)], limit_s)[0]


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(processes: Sequence[subprocess.Popen[str]], limit_s: float = HANG_S) -> list[tuple[int, str]]:
    """Waits for all; none is left behind whatever happens."""
    try:
        texts = [process.communicate(timeout=limit_s)[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(HANG_S)
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


# The same calls as on MPI -----------------------------------------------------------------------------------


@dataclass
class Call:
    """A function that all ranks call. `directory`: it gets a folder of its own."""

    function: str
    parameters: Mapping[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    directory: bool = False

    def arguments(self, folder: Path) -> dict[str, Any]:
        if not self.directory:
            return self.kwargs
        folder.mkdir()
        return {**self.kwargs, "directory": str(folder)}


DDP = {"partitions": 2, "microbatches": 2, "ddp": True}
MANUAL = {**DDP, "auto_partition": False, "default_partition": 0}

CALLS = {
    "getters": Call("api.api_cases:getters", DDP),
    "getters, spread": Call("api.api_cases:getters", {**DDP, "placement_strategy": "spread"}),
    "process groups": Call("api.api_cases:groups_at_work", DDP),
    "process groups need ddp": Call("api.api_cases:process_groups_without_ddp", {"partitions": 4}),
    "gathered objects": Call("api.api_cases:gathered", DDP),
    "large objects": Call("processes.cases:large_objects", DDP),
    "trees": Call("processes.tree_cases:trees", DDP),
    "missing in trees": Call("processes.tree_cases:missing", DDP, {"absent": 2}),
    "messages": Call("api.api_cases:messages", DDP),
    "a number that does not fit": Call("api.api_cases:init_error", {"partitions": 3, "ddp": True}),
    "losses and weights": Call("processes.cases:trained", DDP),
    "losses and weights, 4 stages": Call("processes.cases:trained", {"partitions": 4, "microbatches": 2}),
    "losses and weights among signals": Call("processes.cases:trained_among_signals", DDP),
    "played hosts": Call("processes.cases:local_ranks", DDP, {"hosts": ["b", "a", "b", "b"]}),
    "stop": Call("processes.cases:stopped", DDP, {"told": 2}),
    "one does not ask": Call("processes.cases:one_does_not_ask", DDP, {"absent": 3}),
    "save and load": Call("api.api_checkpoint_cases:save_and_load", MANUAL, directory=True),
    "full checkpoint": Call("api.api_checkpoint_cases:full_checkpoint", MANUAL, directory=True),
    "partial checkpoint": Call(
        "api.api_checkpoint_cases:resume", MANUAL, {"steps_before": 1, "by_tag": True}, directory=True
    ),
    "sharded parameters": Call(
        "processes.cases:trained",
        {**DDP, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    ),
    "communication hook": Call("api.api_model_cases:communication_hook", MANUAL, {"kind": "own"}),
}

WORKER = """
import importlib, json, os, pickle, sys
from pathlib import Path

import torch

import smp_lite as smp

folder, results = Path(sys.argv[1]), {}
for name, (function, parameters, kwargs) in pickle.loads((folder / "calls").read_bytes()).items():
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
    environment = dict(os.environ)
    torch.manual_seed(0)
    module, _, function = function.partition(":")
    results[name] = getattr(importlib.import_module(f"tests.{module}"), function)(**kwargs)
    smp.reset()
    os.environ.clear()
    os.environ.update(environment)
(folder / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(results))
"""


def calls_under_torchrun(
    calls: Mapping[str, tuple[str, Mapping[str, Any], dict[str, Any]]], folder: Path, env: Mapping[str, str]
) -> dict[str, list[Any]]:
    """For each call what the 4 ranks returned, by rank."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    (folder / "calls").write_bytes(pickle.dumps(calls))
    for _ in range(2):
        code, text = torchrun(4, script, str(folder), env=env, limit_s=4 * HANG_S)  # many calls
        if "Gloo connectFullMesh failed" not in text:
            break  # on a machine that is busy enough gloo gives up a connection and does not try again
    assert code == 0, text
    results = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(4)]
    return {name: [result[name] for result in results] for name in calls}


@pytest.fixture(scope="module")
def found(no_mpi: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("calls")
    calls = {
        name: (f"launch.{call.function}", call.parameters, call.arguments(folder / name.replace(" ", "_")))
        for name, call in CALLS.items()
    }
    calls["horovod"] = ("launch.api.api_cases:init_error", {"partitions": 2, "horovod": True}, {})
    calls["mpi backend"] = ("launch.api.api_cases:init_error", {**DDP, "ddp_dist_backend": "mpi"}, {})
    for case in ("gpt_tied", "complex64"):
        parameters = {**DDP, "microbatches": NUM_MICROBATCHES}
        calls[case] = ("transparency.ranks:compare_replicas", parameters, {"name": case, "wire": "c10d"})
    return calls_under_torchrun(calls, folder, no_mpi)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_ranks_of_torchrun_find_what_ranks_of_mpi_find(
    found: dict[str, list[Any]], name: str, tmp_path: Path
) -> None:
    call = CALLS[name]
    wanted = run_distributed(
        f"tests.launch.{call.function}",
        4,
        kwargs=call.arguments(tmp_path / "folder"),
        parameters=call.parameters,
    )
    assert same(found[name], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt_tied", "complex64"])
def test_two_replicas_of_two_stages_train_as_plain_torch_does(found: dict[str, list[Any]], case: str) -> None:
    assert [wrong for _, wrong, _ in found[case]] == [[]] * 4


@pytest.mark.slow
def test_one_machine_that_plays_two_hosts_has_two_local_ranks_0(found: dict[str, list[Any]]) -> None:
    assert found["played hosts"] == [(0, 3), (0, 1), (1, 3), (2, 3)]  # equal on MPI: above


@pytest.mark.slow
def test_what_needs_mpi_says_so(found: dict[str, list[Any]]) -> None:
    for text in found["horovod"]:
        assert text.startswith("SMPError: horovod: True needs a job started by MPI")
        assert "ddp: True" in text
    for text in found["mpi backend"]:
        assert text.startswith("SMPError: ddp_dist_backend: 'mpi' needs a job started by MPI")


# One rank goes wrong ----------------------------------------------------------------------------------------

PREAMBLE = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, smp_lite as smp
rank = int(os.environ["RANK"])
"""
STEPS = """
smp.init({"partitions": 2, "microbatches": 2})
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))

@smp.step
def train(model, x):
    model.backward(model(x).mean())

train(model, torch.ones(4, 4))
"""


def write(directory: Path, body: str) -> Path:
    path = directory / "script.py"
    path.write_text(PREAMBLE + body)
    return path


@pytest.mark.thorough  # the next one is as hard, and takes less time
def test_an_exception_ends_all_and_is_torchruns_root_cause(tmp_path: Path, no_mpi: dict[str, str]) -> None:
    body = "if rank == 1:\n    raise RuntimeError('the cause')\ntrain(model, torch.ones(4, 4))\n"
    script = write(tmp_path, STEPS + body)
    code, text = torchrun(2, script, env=no_mpi)
    assert code == 1
    assert "rank 1 failed:\nTraceback" in text
    root_cause = text.partition("Root Cause")[2]
    assert "rank      : 1 " in root_cause
    assert "RuntimeError: the cause" in root_cause
    assert left_behind(script) == []


@pytest.mark.thorough  # test_api_failures does it with MPI
def test_a_rank_that_hangs_is_named_by_the_watchdog(tmp_path: Path, no_mpi: dict[str, str]) -> None:
    script = write(tmp_path, STEPS + "time.sleep(1000) if rank == 1 else model.state_dict()\n")
    code, text = torchrun(2, script, env={**no_mpi, "SMP_LITE_WATCHDOG_S": "3"})
    assert code == 1
    assert "SMPTimeout: waited 3 s: model.state_dict is collective over the PP group [0, 1]" in text
    assert "rank(s) 1 did not call it" in text
    assert left_behind(script) == []


# Started by hand: nobody but the ranks themselves ends the others -------------------------------------------


def by_hand(
    num_ranks: int, script: Path, env: Mapping[str, str], *, absent: int = 0
) -> list[tuple[int, str]]:
    """Runs a script as ranks that only the environment connects; exit codes and stderr by rank.

    absent: how many of the last ranks are never started.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script)]
    ranks = range(num_ranks - absent)
    return finish([start(command, {**env, **address, "RANK": str(rank)}) for rank in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_fails_is_named_by_the_other(tmp_path: Path, no_mpi: dict[str, str], leaver: int) -> None:
    body = f"if rank == {leaver}:\n    raise RuntimeError('the cause')\ntrain(model, torch.ones(4, 4))\n"
    endings = by_hand(2, write(tmp_path, STEPS + body), no_mpi)
    assert [code for code, _ in endings] == [1, 1]
    assert endings[leaver][1].endswith("RuntimeError: the cause\n")
    said = endings[1 - leaver][1]
    # Rank 0 takes the store with it.
    assert ("rank(s) 1 ended the script early" if leaver else "so rank 0 or its launcher has ended") in said


@pytest.mark.slow
def test_rank_0_stays_with_its_store_until_the_others_have_ended(
    tmp_path: Path, no_mpi: dict[str, str]
) -> None:
    body = """
smp.init({"partitions": 1, "ddp": True})
if rank > 0:
    while 0 not in smp.state.world.transport.departed():
        time.sleep(0.01)
    time.sleep(3)  # in which rank 0 would end, if it did not stay
    if rank == 1:
        smp.send("after rank 0 has ended", 2)
    else:
        assert smp.recv_from(1) == "after rank 0 has ended"
"""
    assert by_hand(3, write(tmp_path, body), no_mpi) == [(0, "")] * 3


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, no_mpi: dict[str, str]) -> None:
    script = write(tmp_path, "smp.init({'partitions': 3})\n")
    endings = by_hand(3, script, {**no_mpi, "SMP_LITE_WATCHDOG_S": "4"}, absent=1)
    assert [code for code, _ in endings] == [1, 1]
    assert "SMPTimeout: waited 4 s: rank(s) 2 of 3 did not come to smp.init at 127.0.0.1:" in endings[0][1]


# One process ------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_one_process_needs_no_mpi(tmp_path: Path, no_mpi: dict[str, str]) -> None:
    body = STEPS.replace('"partitions": 2', '"partitions": 1') + "smp.barrier()\nassert smp.size() == 1\n"
    script = write(tmp_path, f"{body}assert not smp.state.world.transport.has_mpi\n")
    env = {**no_mpi, "RANK": "0", "WORLD_SIZE": "1"}
    assert finish([start([sys.executable, str(script)], env)]) == [(0, "")]


@pytest.mark.ci
def test_mpi_that_is_needed_and_not_there_is_asked_for(tmp_path: Path, no_mpi: dict[str, str]) -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"}
    script = write(tmp_path, "smp.init({'partitions': 2})\n")
    ((code, text),) = finish([start([sys.executable, str(script)], {**no_mpi, **mpi})])
    assert code == 1
    assert "OMPI_COMM_WORLD_RANK is set, so MPI started this process, but mpi4py cannot be loaded" in text
    assert "cannot load MPI library" in text


@pytest.mark.ci
def test_an_mpi_that_is_not_its_launchers_is_told(tmp_path: Path) -> None:
    # As where mpirun of one MPI starts a Python with mpi4py for another: each process is alone.
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"}
    script = write(tmp_path, "smp.init({'partitions': 2})\n")
    ((code, text),) = finish([start([sys.executable, str(script)], {**os.environ, **mpi})])
    assert code == 1
    assert "started 2 process(es), but MPI counts 1: mpirun and mpi4py belong to different MPI" in text
