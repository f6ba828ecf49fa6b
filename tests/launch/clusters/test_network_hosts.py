"""A job over two hosts of a network: two network namespaces with a wire between them.

Each has its own name, address and `/opt/ml` tree; what they share is the disk. It takes root and
`ip`, and is asked for by SMP_LITE_NETWORK_TESTS=1 (`make test-network`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.hosts.secret import SECRET_VARIABLE
from tests.launch.containers.test_train import START
from tests.launch.launching import HANG_S, processes_mentioning

pytestmark = pytest.mark.skipif(
    os.environ.get("SMP_LITE_NETWORK_TESTS") != "1" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs SMP_LITE_NETWORK_TESTS=1, root, and ip",
)

SPACES = ("smp-lite-1", "smp-lite-2")
HOSTS = ("algo-1", "algo-2")
SECRET = "known to the hosts and to no stranger"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, stderr=None if check else subprocess.DEVNULL)


@pytest.fixture(scope="module")
def _network() -> Iterator[None]:
    for space in SPACES:
        ip("netns", "del", space, check=False)
        ip("netns", "add", space)
    ip("link", "add", "smp-lite-a", "type", "veth", "peer", "name", "smp-lite-b")
    for number, (space, wire) in enumerate(zip(SPACES, ("smp-lite-a", "smp-lite-b")), start=1):
        ip("link", "set", wire, "netns", space)
        ip("-n", space, "link", "set", wire, "name", "eth0")
        ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "link", "set", "eth0", "up")
    yield
    for space in SPACES:
        ip("netns", "del", space)


class Cluster:
    """The two hosts, each running `train`."""

    def __init__(self, directory: Path, script: str, **parameters: Any) -> None:
        source = directory / "source"
        source.mkdir()
        (source / "train.py").write_text(START + script)
        self._names = directory / "hosts"
        self._names.write_text("127.0.0.1 localhost\n10.77.0.1 algo-1\n10.77.0.2 algo-2\n")
        self.roots = [directory / host for host in HOSTS]
        values = {
            "sagemaker_program": "train.py",
            "sagemaker_submit_directory": str(source),
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "mp_parameters": {"partitions": 2, "ddp": True, **parameters},
        }
        for host, root in zip(HOSTS, self.roots):
            config = root / "input" / "config"
            config.mkdir(parents=True)
            encoded = {name: json.dumps(value) for name, value in values.items()}
            (config / "hyperparameters.json").write_text(json.dumps(encoded))
            resources = {"current_host": host, "hosts": HOSTS, "network_interface_name": "eth0"}
            (config / "resourceconfig.json").write_text(json.dumps(resources))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, **environment: str) -> subprocess.Popen[bytes]:
        """Start `train` on one host (0, 1); its output goes to `log` in its root."""
        commands = (
            f"hostname {HOSTS[number]}; mount --bind {self._names} /etc/hosts; "
            f"exec {sys.executable} -P -m smp_lite.entrypoints.train --root {self.roots[number]}"
        )
        with (self.roots[number] / "log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", SPACES[number], "unshare", "--uts", "--mount", "sh", "-c", commands],
                env={**os.environ, "SMP_LITE_HOST_LIMIT_S": "20", SECRET_VARIABLE: SECRET, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def run(self) -> tuple[list[int], list[str]]:
        """Run on both; exit codes and outputs by host."""
        self.start(0)
        self.start(1)
        return self.wait()

    def wait(self) -> tuple[list[int], list[str]]:
        try:
            codes = [process.wait(HANG_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return codes, [(root / "log").read_text() for root in self.roots]


@pytest.fixture
def directory(tmp_path: Path, _network: None) -> Path:
    return tmp_path


def test_ranks_run_on_both_hosts_each_with_its_own_environment(directory: Path) -> None:
    script = """
local = world.Split_type(MPI.COMM_TYPE_SHARED)
print("rank", rank, "of", world.size, "local", local.rank, os.environ["SM_CURRENT_HOST"], flush=True)
"""
    codes, outputs = Cluster(directory, script).run()
    assert codes == [0, 0], outputs
    assert sorted(outputs[0].splitlines()) == [
        "[0] rank 0 of 4 local 0 algo-1",
        "[1] rank 1 of 4 local 1 algo-1",
    ]
    assert sorted(outputs[1].splitlines()) == [
        "[2] rank 2 of 4 local 0 algo-2",
        "[3] rank 3 of 4 local 1 algo-2",
    ]


def test_a_model_trains_over_both(directory: Path) -> None:
    script = """
import torch
import smp_lite as smp
smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss
losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(train(model, torch.ones(4, 4)).reduce_mean().item())
    optimizer.step()
print("falls", losses[2] < losses[1] < losses[0], smp.local_rank(), smp.mp_rank(), flush=True)
"""
    codes, outputs = Cluster(directory, script, placement_strategy="spread").run()
    assert codes == [0, 0], outputs
    for first_rank, output in zip((0, 2), outputs):
        for local_rank in range(2):
            assert f"[{first_rank + local_rank}] falls True {local_rank} {first_rank // 2}\n" in output


def test_a_failure_on_the_second_host_is_told_by_the_first(directory: Path) -> None:
    script = "world.Barrier()\nif rank == 3: raise RuntimeError('the cause')\ntime.sleep(60)"
    cluster = Cluster(directory, script)
    codes, outputs = cluster.run()
    assert codes == [1, 1]
    assert outputs[0].splitlines()[-1] == "RuntimeError: the cause"
    failure = (cluster.roots[0] / "output" / "failure").read_text()
    assert failure.startswith("rank 3 failed first: RuntimeError: the cause\n")
    assert "host algo-1 ended with exit code 1" in outputs[1]


def test_the_last_words_of_a_rank_on_another_host_are_told(directory: Path) -> None:
    script = """
print("words of", rank, flush=True)
world.Barrier()
if rank == 3:
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    cluster = Cluster(directory, script)
    codes, outputs = cluster.run()
    text = (cluster.roots[0] / "output" / "failure").read_text()
    if codes == [14, 14]:  # Open MPI has told a peer's abort before the death itself
        assert "lost its connection to a rank of another host" in text
        return
    assert codes == [137, 137], outputs
    assert text.startswith("rank 3 failed first: killed by signal 9 (SIGKILL)")
    assert text.endswith("rank 3 printed last:\nwords of 3")


def test_a_host_that_goes_away_is_named(directory: Path) -> None:
    cluster = Cluster(directory, "open(os.environ['SM_MODEL_DIR'] + '/up', 'w').close()\ntime.sleep(600)")
    cluster.start(0)
    second = cluster.start(1)
    deadline = time.monotonic() + HANG_S
    while not all((root / "model" / "up").exists() for root in cluster.roots):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.kill()
    codes, outputs = cluster.wait()
    assert codes[0] not in (0, None), outputs
    assert (cluster.roots[0] / "output" / "failure").read_text().startswith("host(s) algo-2 went away")
    while left := processes_mentioning(directory):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("present", [0, 1])
def test_a_host_that_does_not_come_is_named(present: int, directory: Path) -> None:
    cluster = Cluster(directory, "print('ran')")
    process = cluster.start(present, SMP_LITE_HOST_LIMIT_S="1")
    assert process.wait(HANG_S) == 1
    absent = HOSTS[1 - present]
    text = (cluster.roots[present] / "output" / "failure").read_text()
    assert f"{absent} did not come within 1 s (port 7790)" in text


def test_a_stop_reaches_the_ranks_of_both_hosts(directory: Path) -> None:
    script = """
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
open(os.environ["SM_MODEL_DIR"] + f"/up-{rank}", "w").close()
while not told:
    time.sleep(0.05)
print("saves", flush=True)
"""
    cluster = Cluster(directory, script)
    processes = [cluster.start(number) for number in range(2)]
    deadline = time.monotonic() + HANG_S
    while not all((cluster.roots[rank // 2] / "model" / f"up-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, outputs = cluster.wait()
    assert codes == [0, 0], outputs
    assert [output.count("saves") for output in outputs] == [2, 2]


@pytest.mark.parametrize("secret", ["", SECRET.swapcase()], ids=["none", "another"])
def test_a_host_with_another_secret_is_a_stranger(secret: str, directory: Path) -> None:
    cluster = Cluster(directory, "print('ran')")
    cluster.start(0, SMP_LITE_HOST_LIMIT_S="3")
    cluster.start(1, SMP_LITE_HOST_LIMIT_S="3", **{SECRET_VARIABLE: secret})
    codes, outputs = cluster.wait()
    assert codes == [1, 1]
    assert "host(s) algo-2 did not come within 3 s (port 7790)" in outputs[0]
    if secret:
        assert (
            "algo-2 answered, but with another key: all hosts need the same SMP_LITE_JOB_SECRET" in outputs[0]
        )
        (told,) = [line for line in outputs[1].splitlines() if "called on port" in line]
        assert told.startswith("smp-lite: 10.77.0.1 called on port 7790 and did not prove to be a host")
    else:
        assert "a job over 2 hosts needs SMP_LITE_JOB_SECRET" in outputs[1]
    for text in (*outputs, *(path.read_text() for path in directory.glob("*/output/failure"))):
        assert SECRET not in text and SECRET.swapcase() not in text


def test_the_secret_is_with_no_rank_and_on_no_command_line(directory: Path) -> None:
    script = f"""
import pathlib
for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        line = (path / "cmdline").read_bytes()
    except OSError:
        continue
    assert {SECRET.encode()!r} not in line, line
environments = []
pid = os.getpid()
while pid > 1:  # up to mpirun or its daemon, and not further: train's own shows what it was started with
    name = pathlib.Path(f"/proc/{{pid}}/comm").read_text().strip()
    environments.append(pathlib.Path(f"/proc/{{pid}}/environ").read_bytes())
    if name in ("mpirun", "prterun", "prted"):
        break
    pid = int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
else:
    raise AssertionError("no daemon above this rank")
for environment in environments:
    assert {SECRET.encode()!r} not in environment and b"JOB_SECRET" not in environment
print("looked at", len(environments) > 1, flush=True)
"""
    codes, outputs = Cluster(directory, script).run()
    assert codes == [0, 0], outputs
    assert [output.count("looked at True") for output in outputs] == [2, 2]


def test_strangers_at_the_port_do_not_keep_the_hosts_apart(directory: Path) -> None:
    """200 callers who say nothing, and some who say a lot, from the other host's own address."""
    strangers = """
import socket, sys, time
held = []
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    try:
        held.append(socket.create_connection(("10.77.0.2", 7790), 1))
        held[-1].settimeout(0.01)
        if len(held) % 3 == 0:
            held[-1].sendall(b"smp_lite hosts 1" + bytes(64))
        held = held[-200:]
    except OSError:
        time.sleep(0.01)
"""
    stranger = subprocess.Popen(["ip", "netns", "exec", SPACES[0], sys.executable, "-c", strangers])
    try:
        codes, outputs = Cluster(directory, "print('ran', flush=True)").run()
    finally:
        stranger.kill()
        stranger.wait()
    assert codes == [0, 0], outputs
    assert [output.count("ran") for output in outputs] == [2, 2]
    assert outputs[1].count("called on port 7790") == 1
