"""The image, without Docker: linted, and its steps done by hand in a folder that holds what COPY copies."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest

REPOSITORY = Path(__file__).parents[3]
DOCKERFILE = REPOSITORY / "entrypoints" / "Dockerfile"
LIMIT_S = 100


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def ignored(path: PurePath) -> bool:
    """Docker's rule: the last pattern that fits the path, or a folder above it, decides."""
    result = False
    for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line.startswith("#") and any(fnmatch(str(name), pattern) for name in (path, *path.parents)):
            result = line == pattern
    return result


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the image in which the package is built."""
    target = tmp_path_factory.mktemp("image")
    for word, rest in instructions():
        if word == "COPY":
            *sources, destination = rest.split()
            for source in sources:
                copy(PurePath(source), target / destination, into=destination.endswith("/"))
    return target


def copy(source: PurePath, destination: Path, *, into: bool) -> None:
    def left_out(folder: str, names: list[str]) -> list[str]:
        below = PurePath(folder).relative_to(REPOSITORY)
        return [name for name in names if ignored(below / name)]

    assert not ignored(source), f"COPY {source}: .dockerignore hides it"
    if (REPOSITORY / source).is_dir():
        shutil.copytree(REPOSITORY / source, destination, ignore=left_out)
    else:
        shutil.copy(REPOSITORY / source, destination / source.name if into else destination)


@pytest.fixture(scope="module")
def wheel(image: Path) -> Path:
    """The package as the image's pip would build it."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*build, "--wheel-dir", "wheels", "."], cwd=image, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    (path,) = (image / "wheels").glob("*.whl")
    return path


def test_only_what_the_package_needs_is_copied(image: Path) -> None:
    names = {path.name for path in image.iterdir()}
    package = {"smp_lite", "entrypoints", "estimator"}
    assert names >= package | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert not {"tests", ".git", "shared", "notebooks"} & names
    assert not list(image.rglob("__pycache__")) and not list(image.glob("entrypoints/Dockerfile*"))


@pytest.mark.ci
def test_what_is_copied_suffices_to_build_the_whole_package(wheel: Path) -> None:
    folders = {
        "smp_lite": "smp_lite",
        "entrypoints": "smp_lite/entrypoints",
        "estimator": "smp_lite/estimator",
    }
    expected = {
        f"{inside}/{path.relative_to(REPOSITORY / folder)}"
        for folder, inside in folders.items()
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert expected - names == set()
    assert {name for name in names if name.startswith("smp_lite/") and name.endswith(".py")} == expected


@pytest.mark.parametrize("argument", [[], ["train"]], ids=["alone", "as SageMaker starts it"])
def test_the_entry_point_of_the_wheel_runs_a_job(wheel: Path, tmp_path: Path, argument: list[str]) -> None:
    (entry_point,) = [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
    assert entry_point[0] == "python"
    python = python_with(wheel, tmp_path)
    root = tmp_path / "ml"
    root.mkdir()
    result = subprocess.run(
        [python, *entry_point[1:], *argument, "--root", str(root)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    # There is no job in the folder, and the entry point says so as the service wants it.
    assert (result.returncode, (root / "output" / "failure").is_file()) == (1, True), result.stderr


def python_with(wheel: Path, directory: Path) -> str:
    """A Python that has the wheel in place of the working copy, and the other packages of this one."""
    venv.create(directory / "venv", with_pip=False, symlinks=True)
    (packages,) = (directory / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    here = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    (packages / "others.pth").write_text(f"{here}\n")
    return str(directory / "venv" / "bin" / "python")


def test_the_last_stage_is_the_one_for_sagemaker_and_needs_no_sshd() -> None:
    stages = [rest.split() for word, rest in instructions() if word == "FROM"]
    names = [words[2] for words in stages]
    assert names[-1] == "sagemaker"
    parents = {words[2]: words[0] for words in stages}
    assert (parents["sagemaker"], parents["kubernetes"]) == ("runtime", "runtime")


def build_commands() -> list[str]:
    """Each `docker build` that the README or the Dockerfile itself tells."""
    texts = [DOCKERFILE.read_text(), (REPOSITORY / "README.md").read_text()]
    found = [
        line.lstrip("# ").rstrip() for text in texts for line in text.splitlines() if "docker build" in line
    ]
    assert len(found) >= 6
    return found


def test_the_build_commands_name_what_there_is() -> None:
    arguments = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    stages = {rest.split()[2] for word, rest in instructions() if word == "FROM"}
    for command in build_commands():
        assert set(re.findall(r"--build-arg (\w+)=", command)) <= arguments, command
        assert set(re.findall(r"--target (\w+)", command)) <= stages, command
        assert re.fullmatch(r"docker build -f entrypoints/Dockerfile -t [\w-]+ .*?\.( +\S.*)?", command), (
            command
        )
    gpu = [command for command in build_commands() if "-t smp-lite-gpu" in command]
    assert {name for command in gpu for name in re.findall(r"--build-arg (\w+)=", command)} == arguments


def test_the_base_is_fixed_and_gpus_are_asked_for() -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert defaults == {
        "BASE": "python:3.11-slim-bookworm",
        "TORCH_INDEX_URL": "https://download.pytorch.org/whl/cpu",
    }
    variables = dict(
        pair.split("=", 1) for word, rest in instructions() if word == "ENV" for pair in rest.split()
    )
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"].split(",") == ["compute", "utility"]


@pytest.mark.parametrize(
    ("base_has_torch", "index", "expected"),
    [
        (True, "https://pypi.org/simple", "install --no-cache-dir .[mpi] boto3>=1.42"),
        *(
            (
                False,
                index,
                "install --no-cache-dir .[mpi] boto3>=1.42 --constraint constraints.txt"
                f" --extra-index-url {index}",
            )
            for index in ("https://pypi.org/simple", "https://download.pytorch.org/whl/cpu")
        ),
    ],
)
def test_torch_comes_from_the_base_or_the_index(
    base_has_torch: bool, index: str, expected: str, tmp_path: Path
) -> None:
    (step,) = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    for name, text in (("python", f"exit {int(not base_has_torch)}"), ("pip", 'echo "$*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["/bin/sh", "-c", step],
        env={"PATH": str(tmp_path), "TORCH_INDEX_URL": index},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{expected}\n", "")


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stdout) == (0, "")
