"""Kinds of devices are named in one file: all others ask it, and so run on any of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "smp_lite"

ALLOWED = {
    "devices.py": "the decision",
    "comm/on_device/cuda_sharing.py": "CUDA's own memory between processes",
    "smp_v1/cuda_as_cpu.py": "a switch for scripts that speak of CUDA",
    "smp_v1/port/reader.py": "reads scripts that speak of CUDA",
    "smp_v1/port/command.py": "the same",
    "config/v1_parameters.py": "a value of SMP's own parameter trace_device",
    "wrapper/distributed_model.py": "the same",
    "systems/dialects/libai.py": "reads another system's configuration",
    "systems/showing/writers.py": "writes another system's configuration",
    "record/parameters/away.py": "the name of Tensor.cpu",
    "deferred/dispatch.py": "the log of a model that is built on the host, and replayed there",
    "deferred/context.py": "the same",
    "deferred/initialising.py": "the same",
    "deferred/draws.py": "the same",
    "checkpoints/portable/reading.py": "files are read into the host's memory",
    "checkpoints/whole_files.py": "the same",
    "integrations/transformers/saving.py": "the same",
    "storage/torch_files.py": "the same",
}
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|mtia)(:\d+)?")
_MODULES = frozenset(["cuda", "xpu", "mps"])


def names_of_devices(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is there): texts that name a device, and uses of one kind's own functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DEVICE.fullmatch(node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and (
            node.attr in _MODULES or node.attr in ("is_cuda", "is_cpu")
        ):
            yield node.lineno, f".{node.attr}"


def found_in(file: Path) -> list[str]:
    """Without sentences: a docstring may speak of a GPU."""
    text = file.read_text()
    docs = {
        node.body[0].value.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    return [f"{file.name}:{line} {what}" for line, what in names_of_devices(text) if line not in docs]


@pytest.mark.ci
def test_one_file_names_kinds_of_devices() -> None:
    found = {
        str(file.relative_to(LIBRARY)): names
        for file in sorted(LIBRARY.rglob("*.py"))
        if (names := found_in(file))
    }
    assert {name: where for name, where in found.items() if name not in ALLOWED} == {}
    assert sorted(ALLOWED.keys() - found.keys()) == [], "these need no leave any more"


@pytest.mark.parametrize(
    "source",
    ["x.to('cuda')", "torch.empty(1, device='cpu')", "torch.cuda.synchronize()", "x.is_cuda", "'mps:0'"],
)
def test_the_search_finds_names(source: str) -> None:
    assert len(list(names_of_devices(source))) == 1


@pytest.mark.parametrize("source", ["x.to(home())", "'the cpu is meant'", "cpu = os.cpu_count()"])
def test_the_search_passes_over_other_things(source: str) -> None:
    assert list(names_of_devices(source)) == []
