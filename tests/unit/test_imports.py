"""The configuration and the plan must load without torch and MPI: launchers import them too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PURE_MODULES = [
    "smp_lite.comm.transports.launcher",
    "smp_lite.config",
    "smp_lite.stop_notice",
    *sorted(
        f"smp_lite.plan.{file.stem}".removesuffix(".__init__")
        for file in (REPOSITORY / "smp_lite" / "plan").glob("*.py")
    ),
    *sorted(
        ".".join(("smp_lite", *file.relative_to(REPOSITORY).with_suffix("").parts))
        for file in (REPOSITORY / "entrypoints").rglob("[a-z]*.py")
    ),
]

FOLDERS = {
    "entrypoints": [".", "hosts", "this_machine", "mpi", "container"],
    "estimator": [".", "request", "local", "quiet"],
    "runtime": [".", "step", "stage", "weights", "graphs", "offloading", "reduction", "sharded"],
}
"""From the top down; "." stands for the other files beside the folders. One that is not here imports from
none."""


def path_of(package: str) -> Path:
    """Where the files of ``smp_lite.<package>`` are."""
    found = REPOSITORY / package
    return found if found.is_dir() else REPOSITORY / "smp_lite" / package


def loaded_by(statement: str) -> set[str]:
    """Returns which of torch and mpi4py a fresh interpreter holds after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*{{'torch', 'mpi4py'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("module", PURE_MODULES)
def test_a_pure_module_imports_neither_torch_nor_mpi4py(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.ci
def test_the_sagemaker_side_imports_neither_torch_nor_mpi4py() -> None:
    names = ("Estimator", "LocalMPISession", "PyTorch", "check_distribution", "request_of")
    assert loaded_by(f"from smp_lite.estimator import {', '.join(names)}") == set()


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_import_only_downwards(package: str) -> None:
    folders = FOLDERS[package]
    for file in sorted(path_of(package).rglob("*.py")):
        folder = folder_of(file.relative_to(path_of(package).parent).with_suffix("").parts)
        below = folders[folders.index(folder) :] if folder in folders else [folder]
        for target in folders_imported_by(file, package):
            assert target in below, f"{file} imports from {target}"


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder, by its name in FOLDERS, of a module of which the path or name has these parts."""
    package, name, *_ = parts
    return name if name in FOLDERS[package] or (path_of(package) / name).is_dir() else "."


def folders_imported_by(file: Path, package: str) -> Iterator[str]:
    """Of the folders of `package`, each that `file` names in an import."""
    inside = ("smp_lite", *file.parent.relative_to(path_of(package).parent).parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else ()
            module = (*base, *filter(None, (node.module or "").split(".")))
            if module[:2] == ("smp_lite", package):
                yield from (folder_of((*module[1:], name.name)) for name in node.names)


def test_the_probe_sees_mpi4py_when_it_is_there() -> None:
    assert loaded_by("import mpi4py") == {"mpi4py"}


def test_the_list_of_pure_modules_is_not_empty() -> None:
    assert {"smp_lite.plan", "smp_lite.plan.topology"} <= set(PURE_MODULES)


LIBRARY = REPOSITORY / "smp_lite"


def room_of(parts: tuple[str, ...]) -> str:
    """The folder of a module of the library; a file of the top level is a room of its own."""
    while len(parts) > 1 and not LIBRARY.joinpath(*parts).is_dir():
        parts = parts[:-1]
    return "/".join(parts)


def rooms_imported_by(file: Path) -> Iterator[str]:
    """The rooms that a file of the library imports from when it runs."""
    here = file.relative_to(LIBRARY).with_suffix("").parts
    tree = ast.parse(file.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    passed_over = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in passed_over:
            base = (*here[: len(here) - node.level], *filter(None, (node.module or "").split(".")))
            for name in node.names:
                whole = (*base, name.name)
                is_module = LIBRARY.joinpath(*whole).with_suffix(".py").exists()
                if room := room_of(whole if is_module else base):
                    yield room


@pytest.mark.ci
def test_rooms_of_the_library_import_in_one_direction() -> None:
    below: dict[str, set[str]] = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        if room := room_of(file.relative_to(LIBRARY).with_suffix("").parts):
            below.setdefault(room, set()).update({*rooms_imported_by(file)} - {room})
    assert {"record/describe", "session"} <= below.keys()
    while below:
        lowest = {room for room, others in below.items() if not others & below.keys()}
        assert lowest, f"these import from each other in a circle: {sorted(below)}"
        below = {room: others for room, others in below.items() if room not in lowest}
