"""Version 3 of the SDK: its container runs our driver, on the folders that it lays out.

The SDK itself cannot be installed beside version 2. By default the container's side is run for real on a
tree of its shape; with SMP_LITE_SDK_V3_PYTHON (a Python that has ``sagemaker>=3.20`` and not necessarily
smp_lite) the request is the SDK's own, and so are the scripts that start the driver.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.job import Job
from smp_lite.entrypoints.mpi.launch_plan import plan_job
from smp_lite.estimator import package_directory
from tests.estimator.aws import BUCKET, REGION, ROLE, boto_session, moto_server

pytestmark = pytest.mark.sampled(3)

DRIVER = "smp_lite/entrypoints/sdk_v3_driver.py"

SCRIPT = """
import argparse, json, os
from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
epochs = parser.parse_args().epochs
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 1:
    with open(os.environ["SM_MODEL_DIR"] + "/seen.json", "w") as file:
        json.dump([MPI.COMM_WORLD.size, json.loads(os.environ["SM_HP_MP_PARAMETERS"]), epochs], file)
"""


def lay_out_config(root: Path, hyperparameters: dict[str, str]) -> None:
    """The files that the service writes."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    resources = {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "network_interface_name": "eth0",
        "current_instance_type": "ml.c5.4xlarge",
    }
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    (config / "inputdataconfig.json").write_text(json.dumps({"code": {}, "sm_drivers": {}}))


def environment_of_a_container() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI", "PMIX", "SM_"))}
    python = str(Path(sys.executable).parent)
    return {**kept, "TRAINING_JOB_NAME": "J", "PIP_NO_INDEX": "1", "PATH": f"{python}:{os.environ['PATH']}"}


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The `/opt/ml` of a job that version 3 sends."""
    root = tmp_path / "ml"
    lay_out_config(root, {"epochs": "3"})
    code, drivers = root / "input" / "data" / "code", root / "input" / "data" / "sm_drivers"
    code.mkdir(parents=True)
    (code / "train.py").write_text(SCRIPT)
    package_directory(drivers / "distributed_drivers")
    (drivers / "sourcecode.json").write_text(json.dumps({"source_dir": "code", "entry_script": "train.py"}))
    strategy = {
        "process_count_per_node": 2,
        "parameters": {"partitions": 2},
        "custom_mpi_options": "--mca btl_base_verbose 0",
    }
    (drivers / "distributed.json").write_text(json.dumps(strategy))
    return root


def run_driver(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    driver = root / "input" / "data" / "sm_drivers" / "distributed_drivers" / DRIVER
    return subprocess.run(
        [sys.executable, str(driver)],
        cwd=root / "input" / "data" / "code",
        env={**environment_of_a_container(), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_the_driver_runs_the_job_of_a_v3_container(container: Path) -> None:
    result = run_driver(container)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((container / "model" / "seen.json").read_text()) == [2, {"partitions": 2}, 3]
    assert_ranks_of_two_hosts(container)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_file", "in_environment", "message"),
    [
        (None, {}, "a job over 2 hosts needs SMP_LITE_JOB_SECRET"),
        ("s" * 43, {}, "host(s) algo-2.invalid did not come within 0 s"),
        ("s" * 43, {"SMP_LITE_JOB_SECRET": "short"}, "SMP_LITE_JOB_SECRET is 5 characters long"),
        (None, {"SMP_LITE_JOB_SECRET": "s" * 32}, "host(s) algo-2.invalid did not come within 0 s"),
    ],
)
def test_the_secret_of_the_hosts_comes_with_the_driver_or_from_the_user(
    in_file: str | None, in_environment: dict[str, str], message: str, container: Path
) -> None:
    if in_file is not None:
        drivers = container / "input" / "data" / "sm_drivers" / "distributed_drivers"
        (drivers / "job_secret").write_text(in_file)
    resources = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2.invalid"]}
    (container / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    distributed = container / "input" / "data" / "sm_drivers" / "distributed.json"
    strategy = json.loads(distributed.read_text())
    distributed.write_text(json.dumps({**strategy, "parameters": {"partitions": 2, "ddp": True}}))
    result = run_driver(container, SMP_LITE_HOST_LIMIT_S="0", **in_environment)
    assert result.returncode == 1
    assert (container / "output" / "failure").read_text().startswith(message), result.stderr


def assert_ranks_of_two_hosts(root: Path) -> None:
    """What the driver has written starts hosts times processes ranks, unlike the SDK's own driver."""
    resources = root / "input" / "config" / "resourceconfig.json"
    resources.write_text(json.dumps({**json.loads(resources.read_text()), "hosts": ["algo-1", "algo-2"]}))
    job = Job.read(root)
    assert job.processes_per_host is not None
    plan = plan_job(
        job,
        processes_per_host=job.processes_per_host,
        mpirun="mpirun",
        mpi_version=(5, 0),
        python="python3",
        environment={},
        script=("train.py",),
        is_root=True,
    )
    assert plan.argv[plan.argv.index("-np") + 1] == "4"


def test_without_version_3_the_error_says_what_to_install() -> None:
    with pytest.raises(
        ImportError, match=r"SMPDistributed needs version 3 .*use smp_lite\.estimator\.PyTorch"
    ):
        from smp_lite.estimator import SMPDistributed  # noqa: F401


SDK_V3_PYTHON = os.environ.get("SMP_LITE_SDK_V3_PYTHON")
needs_version_3 = pytest.mark.skipif(
    SDK_V3_PYTHON is None, reason="SMP_LITE_SDK_V3_PYTHON names no Python with version 3 of the SageMaker SDK"
)

TRAINER = f"""
import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.train import ModelTrainer, defaults
from sagemaker.train.configs import Compute, SourceCode
from smp_lite.estimator import SMPDistributed

# It would simulate the role's permissions, which the server of this test cannot.
defaults.TrainDefaults.get_role = staticmethod(lambda role=None, **_: role)

ModelTrainer(
    training_image="mine:1",
    role={ROLE!r},
    sagemaker_session=Session(boto3.Session(region_name={REGION!r}), default_bucket={BUCKET!r}),
    source_code=SourceCode(source_dir="code", entry_script="train.py"),
    compute=Compute(instance_type="ml.g5.12xlarge", instance_count=2),
    distributed=SMPDistributed(process_count_per_node=2, parameters={{"pipeline_parallel_degree": 2}}),
    hyperparameters={{"epochs": 3}},
    base_job_name="v3",
).train(wait=False)
"""

REFUSALS = """
from smp_lite.estimator import SMPDistributed

for given in (
    {"parameters": {"partitons": 2}},
    {"process_count_per_node": 0},
    {"process_count_per_node": True},
    {"custom_mpi_options": "-np 7"},
    {"process_count_per_nod": 2},
):
    try:
        SMPDistributed(**{"process_count_per_node": 2, "parameters": {"partitions": 2}, **given})
    except ValueError as error:
        print("refused:", str(error).splitlines()[1:3])
    else:
        print("accepted:", given)
"""


def run_version_3(program: str, folder: Path, **environment: str) -> str:
    packages = folder / "packages"
    if not packages.exists():
        package_directory(packages)
        distribution = importlib.metadata.distribution("smp-lite")
        metadata = packages / "smp_lite-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
    result = subprocess.run(
        [str(SDK_V3_PYTHON), "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages), **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_version_3
def test_version_3_refuses_what_the_launch_would(tmp_path: Path) -> None:
    lines = [
        line for line in run_version_3(REFUSALS, tmp_path).splitlines() if "fused" in line or "acc" in line
    ]
    assert [line.startswith("refused:") for line in lines] == [True] * 5
    assert "did you mean 'partitions'?" in lines[0]
    assert "--np 7 contradicts" in lines[3] or "-np 7 contradicts" in lines[3]


@needs_version_3
def test_the_scripts_of_version_3_start_the_job(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    root = tmp_path / "ml"
    with moto_server() as url:
        run_version_3(TRAINER, tmp_path, AWS_ENDPOINT_URL=url)
        client = boto_session().client("sagemaker", endpoint_url=url)
        (summary,) = client.list_training_jobs()["TrainingJobSummaries"]
        request = client.describe_training_job(TrainingJobName=summary["TrainingJobName"])
        for channel in request["InputDataConfig"]:
            download(channel, root / "input" / "data" / channel["ChannelName"], url)
    lay_out_config(root, request["HyperParameters"])
    for name in ("output", "model"):
        (root / name).mkdir()
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash"]
    drivers = root / "input" / "data" / "sm_drivers"
    for script in (*drivers.rglob("*.sh"), *drivers.glob("scripts/*.py"), *drivers.glob("common/*.py")):
        script.write_text(script.read_text().replace("/opt/ml", str(root)))
    result = subprocess.run(
        ["/bin/bash", str(drivers / "sm_train.sh")],
        cwd=root,
        env=environment_of_a_container(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    seen = json.loads((root / "model" / "seen.json").read_text())
    assert seen == [2, {"pipeline_parallel_degree": 2, "partitions": 2}, 3]
    assert len((drivers / "distributed_drivers" / "job_secret").read_text()) == 43
    assert_ranks_of_two_hosts(root)


def download(channel: dict[str, Any], folder: Path, url: str) -> None:
    prefix = channel["DataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
    s3 = boto_session().client("s3", endpoint_url=url)
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        target = folder / item["Key"].removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(BUCKET, item["Key"], str(target))
