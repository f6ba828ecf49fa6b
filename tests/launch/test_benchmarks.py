"""The benchmark tables still come about. (What they say is measured on a machine that does nothing else.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import PARTS

REPOSITORY = Path(__file__).parents[2]


_QUICKEST = ("tensor", "fsdp")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICKEST else pytest.mark.thorough) for name in PARTS]
)
def test_a_table_comes_about(name: str) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", name, "--quick"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    assert "│" in run.stdout
