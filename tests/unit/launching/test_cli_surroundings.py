"""The command line where something around it is wrong: arguments, files, its output, the user's code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_lite.cli import main

TWO = json.dumps({"partitions": 2, "microbatches": 4})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with several functions, in a folder that is the working directory."""
    (tmp_path / "given.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(8, 8)\n"
        "def named():\n"
        "    model = nn.Sequential()\n"
        "    for name in ('\\u0431\\u043b\\u043e\\u043a', 'second'):\n"
        "        model.add_module(name, nn.Linear(8, 8))\n"
        "    return model, torch.zeros(8, 8)\n"
        "def wrong():\n"
        "    return nn.Linear(int('a number'), 8), None\n"
    )
    (tmp_path / "broken.py").write_text("import torch\ntorch.no_such_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "given", raising=False)
    return "given"


def plan(*arguments: str) -> int:
    return main(["plan", "--parameters", TWO, *arguments])


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("", "--png '' is no file"),
        (".", "--png '.' is no file"),
        ("missing/a.png", "--png missing/a.png: there is no folder missing"),
        ("a.nonsense", "--png a.nonsense: the suffix says how to draw: name a .png, .svg or .pdf file"),
        ("a", "--png a: the suffix says how to draw"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_the_plan(
    picture: str, said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--png", picture, f"{module}:model") == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_a_picture_that_cannot_be_written_is_named(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop.png").symlink_to("loop.png")
    assert plan("--png", "loop.png", f"{module}:model") == 2
    assert "--png loop.png cannot be written: Too many levels" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_the_plan(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert plan("--png", "a.png", f"{module}:model") == 2
    shown = capsys.readouterr()
    assert '--png a.png: it needs matplotlib: pip install "smp-lite[plot]"' in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["float32[8,,8]"], "--input 'float32[8,,8]': write for example"),
        (["float32[ ]"], "--input 'float32[ ]': write for example"),
        (["float32[8,99999999999999]"], "--input 'float32[8,99999999999999]': torch cannot make it here"),
        (["float32[99999999999999999999]"], "torch cannot make it here"),
        (
            ["input=float32[8,8]", "input=float32[4,8]"],
            "--input 'input=float32[4,8]': 'input' has been given",
        ),
    ],
)
def test_inputs_that_cannot_be_made(
    inputs: list[str], said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [text for given in inputs for text in ("--input", given)]
    assert plan(*options, f"{module}:model") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("target", ["nothing", ":model", "given:", "."])
def test_what_is_no_target_is_named_though_parameters_follow(
    target: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that follows a script is the script's, so the parameters are not seen."""
    assert main(["plan", target, "--parameters", TWO]) == 2
    assert f"{target!r} is neither a script nor package:function" in capsys.readouterr().err


def test_a_value_error_of_the_users_code_keeps_its_traceback(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").write_text("int('a number')\n")
    for target, line in (
        ("script.py", "int('a number')"),
        (f"{module}:wrong", "nn.Linear(int('a number'), 8)"),
    ):
        with pytest.raises(SystemExit) as ended:
            plan(target)
        assert ended.value.code == 1
        said = capsys.readouterr().err
        assert line in said
        assert said.endswith("ValueError: invalid literal for int() with base 10: 'a number'\n")


def test_an_error_while_a_package_is_imported_is_its_own(module: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        plan("broken:model")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("3", "the number of processes is not a multiple of partitions: 3 processes"),
        ("4", "4 processes hold 2 replicas of partitions=2, but data parallelism is off"),
        ("0", "--world-size 0: there is at least one rank"),
        ("-2", "--world-size -2: there is at least one rank"),
    ],
)
def test_a_number_of_ranks_is_not_passed_over(
    ranks: str, said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--world-size", ranks, f"{module}:model") == 2
    assert said in capsys.readouterr().err


def test_parameters_with_a_key_twice_are_refused(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", '{"partitions": 2, "partitions": 4}', f"{module}:model"]) == 2
    assert "the key 'partitions' stands twice" in capsys.readouterr().err


def test_a_partition_file_that_cannot_be_written_is_named(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"partitions": 2, "partition_file": "missing/partition.json"}
    assert main(["plan", "--parameters", json.dumps(parameters), f"{module}:model"]) == 2
    assert "partition_file='missing/partition.json' cannot be written: " in capsys.readouterr().err


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``line`` of a shell, in which CLI is the command."""
    text = line.replace("CLI", f"'{sys.executable}' -m smp_lite.cli")
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_or_that_is_full(unbuffered: str, module: str) -> None:
    launch = "CLI launch --on slurm --processes-per-host 2 script.py"
    for line, code in (
        (f"{launch} | true; exit ${{PIPESTATUS[0]}}", {0, 141}),
        (f"{launch} >&-", {0}),
        (f"{launch} >/dev/full", {2}),
    ):
        result = shell(line, PYTHONUNBUFFERED=unbuffered)
        assert result.returncode in code, result.stderr
        assert "Traceback" not in result.stderr and "Exception" not in result.stderr
    assert result.stderr == "smp-lite launch: standard output cannot be written to: No space left on device\n"


@pytest.mark.ci
def test_a_plan_of_which_only_the_head_is_read(module: str) -> None:
    line = f"CLI plan --parameters '{TWO}' --lists given:model | head -1; echo ${{PIPESTATUS[0]}}"
    result = shell(line, PYTHONUNBUFFERED="1")
    assert result.stdout.splitlines()[1:] == ["141"]
    assert "Traceback" not in result.stderr


@pytest.mark.ci
def test_names_that_the_terminal_has_no_letters_for(module: str) -> None:
    result = shell(f"CLI plan --parameters '{TWO}' given:named", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert r"\u0431\u043b\u043e\u043a" in result.stdout


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"smp-lite {importlib.metadata.version('smp-lite')}\n"
