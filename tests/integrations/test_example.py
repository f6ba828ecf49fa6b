"""The script that the README names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.thorough
def test_the_example_trains_saves_and_resumes(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "smp_lite.cli", "run", "--processes", "2", *arguments],
            cwd=NOTEBOOKS,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    script = ["train_trainer.py", "--output", str(tmp_path), "--steps"]
    assert "weights: ['model.safetensors']" in run(*script, "15")
    again = run(*script, "20", "--resume")
    assert "'loss'" in again and (tmp_path / "checkpoint-15").is_dir()
