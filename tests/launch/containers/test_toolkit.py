"""The real training toolkit, `sagemaker-training`, as the images of AWS launch jobs: our runtime runs
under it, and our variables are its variables.

It needs an old Open MPI and libraries that clash with ours, so it lives in a virtual environment of
its own, named by SMP_LITE_TOOLKIT_VENV; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.environment import container_environment, script_arguments
from smp_lite.entrypoints.container.job import Job
from tests.example import PARAMETERS

VENV_VARIABLE = "SMP_LITE_TOOLKIT_VENV"
PARTS = Path(__file__).parent / "toolkit"
LIMIT_S = 200
"""A bound against hanging; the toolkit itself sleeps for 30 s after each success."""

# When the first process of its namespace ends, the kernel ends all others in it.
OWN_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = [
    pytest.mark.skipif(VENV_VARIABLE not in os.environ, reason=f"{VENV_VARIABLE} names no environment"),
    pytest.mark.timeout(LIMIT_S + 20),
]

GROUP = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]}
ONE_HOST = {
    "current_host": "algo-1",
    "current_instance_type": "ml.c5.xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1"],
    "instance_groups": [GROUP],
    "network_interface_name": "lo",
}


@pytest.fixture
def venv() -> Path:
    return Path(os.environ[VENV_VARIABLE])


def write_job(
    root: Path,
    hyperparameters: dict[str, Any],
    resources: dict[str, Any],
    channels: dict[str, Any] | None = None,
) -> None:
    """The files of a job below `root`, each hyperparameter encoded as the SDK does."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    for name in ("model", "output/data"):
        (root / name).mkdir(parents=True)
    encoded = {name: json.dumps(value) for name, value in hyperparameters.items()}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text(json.dumps(channels or {}))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have an /opt/ml of its own")
class TestTraining:
    """Two ranks on one host, launched by the toolkit with the Open MPI 4.1 of its environment."""

    def test_two_steps_are_those_of_one_process(self, venv: Path, tmp_path: Path) -> None:
        result = self.train(venv, tmp_path, steps=2)
        assert result.returncode == 0, result.stdout
        assert (tmp_path / "output" / "success").exists()
        ranks = [json.loads((tmp_path / "model" / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert [rank["pp_rank"] for rank in ranks] == [0, 1]
        for rank in ranks:
            assert rank["size"] == 2
            assert len(rank["losses"]) == 2
            assert rank["losses"] == pytest.approx(rank["plain_losses"], rel=1e-6)

    def test_a_rank_that_fails_ends_the_job_and_is_seen_in_the_log(self, venv: Path, tmp_path: Path) -> None:
        result = self.train(venv, tmp_path, steps=2, fail=1)
        assert result.returncode == 1, result.stdout
        assert "ExitCode 1" in (tmp_path / "output" / "failure").read_text()
        assert "RuntimeError: this rank was told to fail" in result.stdout

    def train(self, venv: Path, root: Path, **hyperparameters: int) -> subprocess.CompletedProcess[str]:
        archive = root / "input" / "sourcedir.tar.gz"
        # The seed's job, without its custom options: with these the toolkit fails on Open MPI 4.
        framework = {
            "sagemaker_program": "train.py",
            "sagemaker_submit_directory": "/opt/ml/input/sourcedir.tar.gz",
            "sagemaker_job_name": "seed",
            "sagemaker_region": "us-west-2",
            "sagemaker_container_log_level": 20,
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "sagemaker_mpi_custom_mpi_options": "",
        }
        write_job(root, {**hyperparameters, **framework, "mp_parameters": PARAMETERS}, ONE_HOST)
        with tarfile.open(archive, "w:gz") as source:
            source.add(PARTS / "train.py", "train.py")
        return subprocess.run(
            [
                *OWN_NAMESPACES,
                "sh",
                str(PARTS / "container.sh"),
                str(root),
                "algo-1",
                str(venv / "bin/train"),
            ],
            env={"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )


TWO_HOSTS = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
UNLIKE_GROUPS = {
    "current_host": "algo-3",
    "current_instance_type": "ml.p3.16xlarge",
    "current_group_name": "gpu",
    "hosts": ["algo-1", "algo-2", "algo-3"],
    "instance_groups": [
        {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
        {"instance_group_name": "gpu", "instance_type": "ml.p3.16xlarge", "hosts": ["algo-2", "algo-3"]},
    ],
}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "empty": ({}, ONE_HOST, {}),
    "the seed's": (
        {
            "sagemaker_submit_directory": "s3://bucket/JOB/source/sourcedir.tar.gz",
            "sagemaker_program": "training-script.py",
            "sagemaker_container_log_level": 20,
            "sagemaker_job_name": "JOB",
            "sagemaker_region": "us-west-2",
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 8,
            "sagemaker_mpi_custom_mpi_options": "--mca btl_vader_single_copy_mechanism none ",
            "mp_parameters": PARAMETERS,
            "sagemaker_distributed_dataparallel_enabled": False,
            "sagemaker_instance_type": "ml.p3.16xlarge",
        },
        ONE_HOST,
        {"training": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}},
    ),
    "a value of every kind": (
        {
            "batch-size": 8,
            "B": 1,
            "lr": 1e-4,
            "nesterov": True,
            "resume": None,
            "text": "größe; $HOME 'x'",
            "number": "8",
            "layers": [1, [2, "a"], {"b": None}],
            "nested": {"z": 1, "a": {"y": False}, "größe": "ü"},
            "empty": "",
            "_tuning_objective_metric": "loss",
            "default_user_module_name": "x",
            "sagemaker_s3_output": "s3://bucket/out",
            "sagemaker_program": "pkg/train.sh",
        },
        ONE_HOST,
        {"Train-Set": {}, "val": {"ContentType": "text/csv"}},
    ),
    "two hosts without groups": ({"sagemaker_program": "train.py"}, TWO_HOSTS, {"train": {}}),
    "two hosts and mpi": ({"sagemaker_mpi_enabled": True}, TWO_HOSTS, {}),
    "unlike groups, none of them distributed": ({}, UNLIKE_GROUPS, {}),
    "unlike groups, this one distributed": ({"sagemaker_torch_distributed_enabled": True}, UNLIKE_GROUPS, {}),
    "unlike groups, the other distributed": (
        {"sagemaker_mpi_enabled": True, "sagemaker_distribution_instance_groups": ["cpu"]},
        UNLIKE_GROUPS,
        {},
    ),
    "a topology": ({}, {**TWO_HOSTS, "topology": [{"hostName": "algo-1", "capacityUnitId": "u"}]}, {}),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_variable_is_the_toolkits(venv: Path, tmp_path: Path, name: str) -> None:
    write_job(tmp_path, *JOBS[name])
    job = Job.read(tmp_path)
    # In a container the service gives the name of the job in this variable.
    service = {"TRAINING_JOB_NAME": job.job_name} if job.job_name else {}
    result = subprocess.run(
        [str(venv / "bin" / "python"), str(PARTS / "environments.py")],
        env={"PATH": os.environ["PATH"], "SAGEMAKER_BASE_DIR": str(tmp_path), **service},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    expected = json.loads(result.stdout)
    variables = expected["variables"]
    counts = {"num_cpus": int(variables["SM_NUM_CPUS"]), "num_gpus": int(variables["SM_NUM_GPUS"])}
    assert container_environment(job, **counts) == variables
    assert script_arguments(job, pass_parameters=True) == expected["arguments"]
