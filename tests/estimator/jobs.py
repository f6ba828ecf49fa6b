"""How the tests of the local mode build an estimator, and what they read after a job."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

from sagemaker.pytorch import PyTorch

from smp_lite.estimator.local.session import LocalMPISession

IMAGE = "000000000000.dkr.ecr.us-west-2.amazonaws.com/any:latest"

SCRIPT_START = """\
import json, os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank = world.rank
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def output(name, text):
    with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], name), "w") as file:
        file.write(text)
def model(name, text):
    with open(os.path.join(os.environ["SM_MODEL_DIR"], name), "w") as file:
        file.write(text)
"""


def distribution(processes: int = 2, **parameters: Any) -> dict[str, Any]:
    """As in the documentation of SageMaker's modelparallel library."""
    return {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, **parameters}}},
        "mpi": {"enabled": True, "processes_per_host": processes},
    }


def estimator(directory: Path, script: str, **changes: Any) -> PyTorch:
    """The stock PyTorch estimator on a LocalMPISession, with `script` after SCRIPT_START as its code."""
    source = directory / "source"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text(SCRIPT_START + script)
    arguments: dict[str, Any] = {
        "entry_point": "train.py",
        "source_dir": str(source),
        "role": "SageMakerRole",
        "instance_count": 1,
        "instance_type": "local",
        "image_uri": IMAGE,
        "sagemaker_session": LocalMPISession(directory / "jobs"),
        "distribution": distribution(ddp=True),
        "max_run": 60,
        **changes,
    }
    return PyTorch(**arguments)


def files_in(uri: str) -> dict[str, str]:
    """Names and texts of the files in a tar.gz at a file:// address."""
    with tarfile.open(fileobj=io.BytesIO(Path(urlsplit(uri).path).read_bytes())) as archive:
        return {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile()
        }


def outputs_of(job: PyTorch) -> dict[str, str]:
    return files_in(job.model_data.replace("model.tar.gz", "output.tar.gz"))


def processes_of(directory: Path) -> list[str]:
    """Command lines of the processes that work under `directory`, by their arguments or their folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            folder = os.readlink(entry / "cwd")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it ended while we looked
        mentioned = str(directory) in words or folder.startswith(str(directory))
        if mentioned and state != "Z" and int(entry.name) != os.getpid():
            found.append(words)
    return found


def process_ids(*words: str) -> list[int]:
    """Processes whose command line contains all `words`; a space ends an argument."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        if all(word in line for word in words):
            found.append(int(entry.name))
    return found


def write_wheel(directory: Path, module: str, text: str) -> Path:
    """A wheel of one module, made without the network that building one would take."""
    path = directory / f"{module}-1-py3-none-any.whl"
    info = f"{module}-1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}.py", text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path
