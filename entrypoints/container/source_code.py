"""The user's code: from where the job says it is into the folder it runs in, with what it requires.

The folder is `code_dir` (`/opt/ml/code`), as in AWS's images. `requirements.txt` is installed as
there, by pip into this Python. A job on somebody's own machine (`apart`) must not change the Python
that the person works with: there, what is missing goes into a folder of the job.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .addresses import bucket_and_key, file_path, split_address

__all__ = ["fetch_source", "install_requirements"]

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
_PIP_LIMIT_S = 1800.0


def fetch_source(location: str, directory: Path) -> None:
    """Bring the code at `location` into `directory`.

    Args:
        location: `s3://bucket/key.tar.gz`, or a tar.gz or a folder of this machine as a path or as
            `file://path`.

    Raises:
        ValueError: it is not there, cannot be read, or is no tar archive.
    """
    directory.mkdir(parents=True, exist_ok=True)
    scheme, rest = split_address(location)
    if scheme == "s3":
        with tempfile.TemporaryDirectory() as temporary:
            archive = Path(temporary) / "sourcedir.tar.gz"
            _download(*bucket_and_key(rest), archive)
            _unpack(archive, directory, location)
        return
    if scheme not in ("", "file"):
        raise ValueError(
            f"sagemaker_submit_directory is {location!r}: it must be an s3:// or file:// address or a path"
        )
    path = file_path(rest) if scheme else Path(location)
    if path.is_dir():
        if path.resolve() != directory.resolve():
            shutil.copytree(path, directory, dirs_exist_ok=True, symlinks=True)
    elif path.is_file():
        _unpack(path, directory, location)
    else:
        raise ValueError(f"sagemaker_submit_directory is {location!r}, but there is no such file or folder")


def install_requirements(directory: Path, *, apart: Path | None = None) -> None:
    """Install what `directory`/requirements.txt asks for, if there is one.

    Args:
        apart: a folder for what this Python lacks; the caller puts it on PYTHONPATH. None: install into
            this Python.

    Raises:
        ValueError: pip could not; with its last lines.
    """
    if not (directory / "requirements.txt").is_file():
        return
    wanted = ("--requirement", "requirements.txt")
    if apart is None:
        _run_pip("install", *wanted, cwd=directory)
        return
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        _run_pip("install", "--dry-run", "--report", str(report), *wanted, cwd=directory)
        missing = [
            f"{item['metadata']['name']} @ {item['download_info']['url']}"
            for item in json.loads(report.read_text("utf-8"))["install"]
        ]
    if missing:
        _run_pip("install", "--no-deps", "--target", str(apart), *missing, cwd=directory)


def _run_pip(*arguments: str, cwd: Path) -> None:
    with subprocess.Popen(
        [*_PIP, *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    ) as pip:
        try:
            output, _ = pip.communicate(timeout=_PIP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ValueError(f"requirements.txt: pip did not end within {_PIP_LIMIT_S:.0f} s") from None
        finally:
            if pip.poll() is None:
                os.killpg(pip.pid, signal.SIGKILL)  # with the builds that it has started
    if pip.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()
        errors = [line.strip() for line in lines if "error:" in line.lower()] or lines[-5:]
        raise ValueError("requirements.txt could not be installed:\n" + "\n".join(errors))


def _download(bucket: str, key: str, target: Path) -> None:
    import boto3  # only jobs in the cloud need it
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        boto3.client("s3").download_file(bucket, key, str(target))
    except (BotoCoreError, ClientError) as error:
        raise ValueError(f"the source code s3://{bucket}/{key} could not be downloaded: {error}") from error


def _unpack(archive: Path, directory: Path, location: str) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(
            f"the source code {location!r} could not be unpacked as a tar.gz archive: {error}"
        ) from error
    for path in directory.rglob("*.sh"):
        os.chmod(path, path.stat().st_mode | 0o100)
