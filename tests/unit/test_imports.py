"""The configuration and the plan must load without torch and MPI: launchers import them too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PURE_MODULES = [
    "smp_lite.comm.launcher",
    "smp_lite.config",
    "smp_lite.stop_notice",
    *sorted(
        f"smp_lite.plan.{file.stem}".removesuffix(".__init__")
        for file in (REPOSITORY / "smp_lite" / "plan").glob("*.py")
    ),
    *sorted(f"smp_lite.entrypoints.{file.stem}" for file in (REPOSITORY / "entrypoints").glob("[a-z]*.py")),
]


def loaded_by(statement: str) -> set[str]:
    """Returns which of torch and mpi4py a fresh interpreter holds after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*{{'torch', 'mpi4py'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("module", PURE_MODULES)
def test_a_pure_module_imports_neither_torch_nor_mpi4py(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_sagemaker_side_imports_neither_torch_nor_mpi4py() -> None:
    names = ("Estimator", "LocalMPISession", "PyTorch", "check_distribution", "request_of")
    assert loaded_by(f"from smp_lite.estimator import {', '.join(names)}") == set()


def test_the_probe_sees_mpi4py_when_it_is_there() -> None:
    assert loaded_by("import mpi4py") == {"mpi4py"}


def test_the_list_of_pure_modules_is_not_empty() -> None:
    assert {"smp_lite.plan", "smp_lite.plan.topology"} <= set(PURE_MODULES)
