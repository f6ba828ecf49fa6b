"""How smp_lite travels with a job: inside the archive of the user's source.

The SDK packs the entry point, `source_dir` and every folder of `dependencies` into one archive, which
is unpacked into the folder that the script runs in. A copy of this package among the dependencies makes
``import smp_lite`` work in any image. What the package itself needs (pydantic, mpi4py, ...) is not in
it: an image of AWS installs what the user's requirements.txt lists.

An image of the user's own has nobody to unpack that archive and to start MPI. There the container starts
with `CONTAINER_ENTRY_POINT`: Python, the archive as a channel of the job, and `entrypoints/start.py` out
of it, which installs the package's requirements and runs the job. So the image needs Python, pip and
torch, and neither boto3 nor credentials. Channel and path are those which the SDK itself uses for a
container without network.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from smp_lite.config import ConfigError

__all__ = ["ARCHIVE", "CONTAINER_ENTRY_POINT", "check_source", "package_directory"]

#: The archive in the container, as the SDK's `CONTAINER_CODE_CHANNEL_SOURCEDIR_PATH` has it.
ARCHIVE = "/opt/ml/input/data/code/sourcedir.tar.gz"

#: What a container runs that does not know this package: no shell, 256 characters at most.
CONTAINER_ENTRY_POINT = (
    "python3",
    "-c",
    f"import tarfile; source = tarfile.open({ARCHIVE!r}); "
    "exec(source.extractfile('smp_lite/entrypoints/start.py').read())",
)

_PACKAGE = "smp_lite"
#: Their folders lie elsewhere in a checkout, and so in an editable installation.
_MAPPED = ("entrypoints", "estimator")
#: What the image brings; pip must never exchange it.
_OF_THE_IMAGE = "torch"


def package_directory(target: Path) -> Path:
    """Copies the installed package into a new folder `smp_lite` below `target`, and returns that folder.

    It is whole whatever the installation looks like, and holds a requirements.txt without torch.
    """
    folder = target / _PACKAGE
    for name in (_PACKAGE, *(f"{_PACKAGE}.{part}" for part in _MAPPED)):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations, name
        shutil.copytree(
            spec.submodule_search_locations[0],
            target.joinpath(*name.split(".")),
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in _requirements()), "utf-8")
    return folder


def _requirements() -> list[str]:
    """What smp_lite and MPI need, as lines for pip, from the metadata of the installed package."""
    lines = []
    for line in importlib.metadata.requires("smp-lite") or ():
        requirement, _, marker = line.partition(";")
        is_extra = "extra ==" in marker
        if requirement.startswith(_OF_THE_IMAGE) or (is_extra and '"mpi"' not in marker):
            continue
        lines.append(requirement.strip())
    return lines


def check_source(
    entry_point: str, source_dir: str | None, dependencies: Sequence[str], left_out: Path | None = None
) -> None:
    """Checks that everything that is going to be packed is there and can be read.

    Args:
        entry_point: as of the estimator, like the next two.
        source_dir: a folder, or an address in S3, which is not looked at.
        dependencies: files and folders.
        left_out: a folder that is not going to be packed, wherever it lies.

    Raises:
        ConfigError: for the first file or folder that is not, naming the argument it came from.
    """
    if source_dir is not None and source_dir.lower().startswith("s3://"):
        return
    if source_dir is not None and not os.path.isdir(source_dir):
        raise ConfigError(
            f"source_dir={source_dir!r} is not a folder (working directory: {os.getcwd()}): give the folder "
            "that holds the entry point, or leave it out"
        )
    script = os.path.join(source_dir or "", entry_point)
    if not os.path.isfile(script):
        # The first words are the SDK's.
        where = f'directory "{source_dir}"' if source_dir else f'working directory "{os.getcwd()}"'
        raise ConfigError(
            f'No file named "{entry_point}" was found in {where}: give entry_point as a path relative to '
            "source_dir, or to the working directory if there is none"
        )
    for name in dependencies:
        if not os.path.exists(name):
            raise ConfigError(
                f"dependencies: {name!r} does not exist (working directory: {os.getcwd()}): give the path of "
                "a file or folder"
            )
    for path in (source_dir or script, *dependencies):
        _check_readable(path, left_out)


def _check_readable(path: str, left_out: Path | None) -> None:
    """Looks into every file, as the SDK is about to, which also follows links."""
    try:
        names = [path] if os.path.isfile(path) else _names_below(path, left_out)
        for name in names:
            if stat.S_ISREG(os.stat(name).st_mode):
                with open(name, "rb"):
                    pass
    except OSError as error:
        raise ConfigError(
            f"{error.filename!r}, which would be sent with the job, cannot be read ({error.strerror}): "
            "mend it, or move it out of the folder"
        ) from None


def _names_below(folder: str, left_out: Path | None) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for directory, folders, names in os.walk(folder, onerror=fail):
        if left_out is not None and left_out.name in folders:
            inner = Path(directory, left_out.name)
            if inner.resolve() == left_out.resolve():
                folders.remove(left_out.name)
        yield from (os.path.join(directory, name) for name in names)
