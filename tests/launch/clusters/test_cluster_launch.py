"""What `smp-lite launch` prints, executed: the cluster is played, the shell and mpirun are real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from smp_lite.entrypoints.clusters.cluster_job import ClusterJob
from smp_lite.entrypoints.clusters.kubernetes_manifest import kubernetes_manifest
from smp_lite.entrypoints.clusters.slurm_script import slurm_script
from smp_lite.entrypoints.mpi.mpirun import find_mpirun
from tests.launch.launching import HANG_S

HOSTILE = ["a b", "1e-3", "$(touch harm)", "`touch harm`", "; touch harm", ">harm", "&&", "$HOME", "$$", "*"]
HOSTILE += ["~", "!!", "'", '"', "\\", "\\n", "new\nline", "tab\t", "#no comment", "%d", "{x}", "é☃"]
HOSTILE += ["-x", "--np", "--", ""]
PARAMETERS = {"partitions": 2, "partition_file": "it's $(touch harm)\n"}

SHOW = """\
import json, os, sys
shown = {name: os.environ.get(name) for name in %r}
sys.stdout.write(json.dumps({"args": sys.argv[1:], "environment": shown}) + "\\n")
"""


def a_job(**changes: Any) -> ClusterJob:
    settings = {"name": "train", "hosts": 2, "processes_per_host": 1, "script": "show.py"}
    return ClusterJob(**{**settings, "args": tuple(HOSTILE), "parameters": PARAMETERS, **changes})


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_on_slurm(directory: Path, job: ClusterJob, environment: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Run the batch script of `job` as Slurm would, with a srun that shows what it was given.

    Returns the exit code and what was shown.
    """
    names = ["SM_HP_MP_PARAMETERS", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"]
    commands = directory / "bin"
    commands.mkdir()
    executable(commands / "srun", f"#!{sys.executable}\n{SHOW % names}sys.exit(7)\n")
    hostnames = 'echo "$3" | tr , "\\n"'
    executable(commands / "scontrol", f'#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && {hostnames}\n')
    script = directory / "job.sh"
    script.write_text(slurm_script(job))
    result = subprocess.run(
        ["bash", str(script)],
        cwd=directory,
        env={"PATH": f"{commands}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def test_hostile_arguments_reach_srun_as_they_are(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node7,node8"}
    code, shown = run_on_slurm(tmp_path, a_job(), slurm)
    assert code == 7  # srun's own, which is that of the rank that failed
    options = ["--mpi=pmix", "--kill-on-bad-exit=1", "--label"]
    assert shown["args"] == [*options, "python", "-m", "smp_lite.smp_v1", "show.py", *HOSTILE]
    environment = shown["environment"]
    assert json.loads(environment.pop("SM_HP_MP_PARAMETERS")) == PARAMETERS
    assert environment == {
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "23456",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "job.sh"]


def test_ranks_get_the_cores_that_slurm_was_asked_for(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node7", "SLURM_CPUS_PER_TASK": "8"}
    assert run_on_slurm(tmp_path, a_job(), slurm)[1]["environment"]["OMP_NUM_THREADS"] == "8"


def test_the_mpirun_of_a_manifest_starts_its_ranks_on_the_workers(tmp_path: Path) -> None:
    # As in a cluster: two workers that only ssh reaches, whose sessions have none of our environment.
    # Here ssh stays on this machine and notes the host it was to go to.
    (tmp_path / "show.py").write_text(SHOW % ["SM_HP_MP_PARAMETERS", "OMPI_COMM_WORLD_RANK", "WORKER"])
    ssh = executable(
        tmp_path / "ssh",
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n"
        'exec env -i PATH=/usr/bin:/bin HOME="$HOME" WORKER="$1" bash -c "${*:2}"\n',
    )
    hosts = [f"train-worker-{index}.train-worker.default.svc" for index in (0, 1)]
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
    manifest = yaml.safe_load(kubernetes_manifest(a_job(), image="train:1"))
    launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"] == ["mpirun"]
    arguments = [argument.replace("$$", "$") for argument in launcher["args"]]
    arguments[arguments.index("/etc/mpi/hostfile")] = str(tmp_path / "hostfile")
    process = subprocess.Popen(
        [find_mpirun(), *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            **{entry["name"]: entry["value"].replace("$$", "$") for entry in launcher["env"]},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PRTE_MCA_plm_ssh_agent": str(ssh),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.terminate()  # for one that hangs: killed, it could not end its ranks
        process.wait()
    assert process.returncode == 0, stderr
    tagged = [re.fullmatch(r"\[1,(\d)\]<stdout>: ?(.*)", line) for line in stdout.splitlines()]
    shown = {int(match[1]): json.loads(match[2]) for match in tagged if match}
    assert sorted(shown) == [0, 1]
    for rank, host in enumerate(hosts):
        assert shown[rank]["args"] == HOSTILE
        environment = shown[rank]["environment"]
        assert (environment["OMPI_COMM_WORLD_RANK"], environment["WORKER"]) == (str(rank), host)
        assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == PARAMETERS
    assert not (tmp_path / "harm").exists()
