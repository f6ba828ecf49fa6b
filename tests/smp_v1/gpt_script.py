"""Runs ``scripts/train_gpt.py``, the GPT training script of SMP v1."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.launch.launching import launch

__all__ = ["SCRIPTS", "gpt", "pp", "tokens"]

SCRIPTS = Path(__file__).with_name("scripts")


def tokens(folder: Path) -> Path:
    """The folder, with two files of tokens."""
    draw = random.Random(0)
    for number in range(2):
        rows = [[(3 * i + 5 * j + draw.randrange(3)) % 61 for j in range(16)] for i in range(32)]
        lines = [json.dumps({"input_ids": row, "attention_mask": [1] * 16}) for row in rows]
        (folder / f"{number}.json").write_text("\n".join(lines))
    return folder


def gpt(folder: Path, data: Path, processes: int, *args: str, steps: int = 6, fails: bool = False) -> Any:
    """What the script recorded; with ``fails`` its output."""
    for name in ("output", "model"):
        (folder / name).mkdir(exist_ok=True)
    arguments = [str(SCRIPTS / "train_gpt.py"), "--max_steps", str(steps), *args]
    environment = {"SM_CHANNEL_TRAIN": str(data), "TRANSFORMERS_VERBOSITY": "error"}
    ended = launch(folder, "--processes", str(processes), "--cuda-as-cpu", *arguments, env=environment)
    if fails:
        assert ended.returncode != 0
        return ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "training finished successfully" in ended.stdout
    return json.loads((folder / "output" / "record.json").read_text())


def pp(degree: int, *more: str) -> list[str]:
    return ["--pipeline_parallel_degree", str(degree), *more]
