"""Runs a notebook from a clean kernel, in a copy of its folder."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

_CELL_LIMIT_S = 240
"""A bound against hanging; the longest cell takes some ten seconds."""


class _ThisPython(KernelSpecManager):  # type: ignore[misc]
    """Kernels of the Python that runs the tests, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name=kernel_name,
            language="python",
        )


def execute(
    name: str, directory: Path, *, parameters: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Any:
    """Runs a notebook to its end and returns it with its outputs.

    Args:
        name: of the file.
        directory: for the copy of the folder, and what the notebook writes beside it.
        parameters: values for names that the first cell, tagged `parameters`, gives.
        environment: for the kernel, in addition to this process's.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    copy = directory / "notebooks"
    if not copy.exists():
        shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    notebook = nbformat.read(copy / name, as_version=4)
    _set_parameters(notebook, parameters)
    env = {
        **os.environ,
        "IPYTHONDIR": str(directory / "ipython"),
        # Nobody's own AWS account.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        **(environment or {}),
    }
    # A short path: it becomes that of sockets, of which systems take about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        manager = AsyncKernelManager(
            kernel_spec_manager=_ThisPython(),
            transport="ipc",
            ip=f"{sockets}/ipc",
            connection_file=f"{sockets}/kernel.json",
        )
        client = NotebookClient(
            notebook, km=manager, timeout=_CELL_LIMIT_S, resources={"metadata": {"path": str(copy)}}
        )
        client.execute(env=env)
    return notebook


def printed(notebook: Any) -> str:
    """What the cells wrote to standard output."""
    return "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")


def pictures(notebook: Any) -> int:
    """How many PNG pictures the cells show."""
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def _set_parameters(notebook: Any, parameters: Mapping[str, Any]) -> None:
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    for key, value in parameters.items():
        cell.source, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value!r}", cell.source)
        assert count == 1, f"the parameters cell gives no {key}"
