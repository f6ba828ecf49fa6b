"""``smp-lite plan``: what it prints, for a script and for a function, without processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smp_lite import session
from smp_lite.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
FOUR = json.dumps({"partitions": 4, "microbatches": 8})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planned.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def equal():\n"
        "    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), torch.zeros(64, 512)\n"
        "def huge():\n"
        "    with torch.device('meta'):\n"
        "        return nn.Sequential(*[nn.Linear(100_000, 100_000) for _ in range(8)])\n"
        "def number():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "planned"


def test_a_function_is_planned(package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    code = main(["plan", "--parameters", FOUR, "--lists", "--png", str(picture), f"{package}:equal"])
    text = capsys.readouterr().out
    assert code == 0
    assert "0-1" in text
    assert "6-7" in text
    # The 1F1B staircase of the papers, as lists.
    assert "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7" in text
    assert "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7" in text
    bubble = re.search(r"bubble ([\d.]+)%", text)
    assert bubble is not None
    # The loss makes the last stage a little longer than the others.
    assert float(bubble[1]) / 100 == pytest.approx((4 - 1) / (8 + 4 - 1), abs=0.03)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not session.is_initialized()


def test_options_may_follow_a_function(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{package}:equal", "--parameters", FOUR]) == 0
    assert "4 partitions, 8 microbatches" in capsys.readouterr().out


def test_a_model_larger_than_the_machine(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--parameters", FOUR, "--input", "float32[16,100000]", f"{package}:huge"])
    assert code == 0
    assert "80,000,800,000" in capsys.readouterr().out


def test_a_script_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    script = REPOSITORY / "notebooks" / "train_gpt.py"
    parameters = json.dumps({"partitions": 2, "microbatches": 4, "ddp": True})
    assert main(["plan", "--parameters", parameters, str(script), "--blocks", "6"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"blocks\.(\d-)?5", text)
    assert "stage 1: " in text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("planned:number", "must return an nn.Module"),
        ("planned:missing", "has no 'missing'"),
        ("planned:huge", "--input"),
        ("no_such_package:f", "cannot be imported"),
        ("no_such_script.py", "is not a file"),
    ],
)
def test_bad_targets(target: str, message: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", FOUR, target]) == 2
    assert message in capsys.readouterr().err
