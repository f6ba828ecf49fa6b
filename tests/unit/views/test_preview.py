"""``smp-lite plan``: what it prints, for a script and for a function, without processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smp_lite import session
from smp_lite.cli import main
from smp_lite.record.step.recorder import Recorder
from smp_lite.steps.step_context import StepContext

REPOSITORY = Path(__file__).resolve().parents[3]
FOUR = json.dumps({"partitions": 4, "microbatches": 8})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planned.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def equal():\n"
        "    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), torch.zeros(64, 512)\n"
        "def blocks():\n"
        "    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), torch.zeros(4096, 1024)\n"
        "def huge():\n"
        "    with torch.device('meta'):\n"
        "        return nn.Sequential(*[nn.Linear(100_000, 100_000) for _ in range(8)])\n"
        "def number():\n"
        "    return 3\n"
        "def ends():\n"
        "    raise SystemExit\n"
        "class Masked(nn.Module):\n"
        "    def __init__(self, grows=False):\n"
        "        super().__init__()\n"
        "        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n"
        "        self.grows, self.calls = grows, 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        times = self.calls if self.grows else 1\n"
        "        mask = torch.arange(64.) * 2\n"
        "        for part in [*self.parts[:-1]] * times + [self.parts[-1]]:\n"
        "            x = part(x) * mask\n"
        "        return x\n"
        "def masked():\n"
        "    return Masked(), torch.zeros(64, 64)\n"
        "def growing():\n"
        "    return Masked(True), torch.zeros(64, 64)\n"
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
    makespan = re.search(r"^makespan of one step +([\d.]+) GFLOP ", text, re.MULTILINE)
    work = re.search(r"^work of all stages +([\d.]+) GFLOP ", text, re.MULTILINE)
    idle = re.search(r"^idle +([\d.]+)% ", text, re.MULTILINE)
    assert makespan and work and idle
    # The loss makes the last stage a little longer than the others.
    assert float(idle[1]) / 100 == pytest.approx((4 - 1) / (8 + 4 - 1), abs=0.03)
    assert 1 - float(work[1]) / (4 * float(makespan[1])) == pytest.approx(float(idle[1]) / 100, abs=0.002)
    # Forward and backward of 8 layers on 64 rows.
    assert float(work[1]) == pytest.approx(3 * 8 * 2 * 64 * 512 * 512 / 1e9, rel=0.1)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not session.is_initialized()


@pytest.mark.parametrize("name", ["equal", "masked", "growing"])
def test_microbatches_that_repeat_the_second_are_not_recorded(
    name: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    begin, take = Recorder.begin_microbatch, StepContext._take_rest
    monkeypatch.setattr(
        Recorder, "begin_microbatch", lambda recorder, m: (recorded.append(m), begin(recorder, m))[1]
    )
    texts, counts = [], []
    for function in (take, lambda context, recording: False):
        monkeypatch.setattr(StepContext, "_take_rest", function)
        recorded.clear()
        assert main(["plan", "--parameters", FOUR, "--lists", f"{package}:{name}"]) == 0
        texts.append(capsys.readouterr().out)
        counts.append(len(recorded))
    assert texts[0] == texts[1]
    assert counts == ([8, 8] if name == "growing" else [2, 8])


def test_options_may_follow_a_function(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{package}:equal", "--parameters", FOUR]) == 0
    assert "4 partitions, 8 microbatches" in capsys.readouterr().out


def test_a_model_larger_than_the_machine(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--parameters", FOUR, "--input", "float32[16,100000]", f"{package}:huge"])
    assert code == 0
    assert "80,000,800,000" in capsys.readouterr().out


def test_what_is_offloaded_is_said_to_be_counted(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for offloaded in (False, True):
        parameters = json.dumps({**json.loads(FOUR), "offload_activations": offloaded})
        assert main(["plan", f"{package}:equal", "--parameters", parameters]) == 0
        texts.append(capsys.readouterr().out)
    assert ["- offload_activations: " in text for text in texts] == [False, True]


@pytest.mark.slow
def test_a_script_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    script = REPOSITORY / "notebooks" / "train_gpt.py"
    parameters = json.dumps({"partitions": 2, "microbatches": 4, "ddp": True})
    assert main(["plan", "--parameters", parameters, str(script), "--blocks", "6"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"blocks\.(\d-)?5", text)
    when = r"([FB]\d|optimizer\.step\(\)|gradients reduced)"
    rows = re.findall(rf"^ +(\d) +[\d.]+ [KM]iB  {when}  ", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    assert "- replicas are assumed" in text


def test_the_memory_of_what_cannot_be_planned_is_not_a_number(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "looks.py").write_text(
        "import torch\n"
        "class Looks(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return gradient * float(gradient.sum())\n"
        "class Layer(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return Looks.apply(super().forward(x))\n"
        "def model():\n"
        "    return torch.nn.Sequential(Layer(4, 4), Layer(4, 4)), torch.zeros(8, 4)\n"
    )
    picture = tmp_path / "schedule.svg"
    parameters = json.dumps({"partitions": 2, "microbatches": 2})
    assert main(["plan", "--parameters", parameters, "--png", str(picture), "looks:model"]) == 0
    text = capsys.readouterr().out
    assert "makespan of one step" in text
    assert "memory: not known, since 0B0 does not run on tensors without data (DataDependent" in text
    assert "<!-- memory -->" not in picture.read_text()


def test_the_losss_share_of_memory_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 60,000: 11 MB for each microbatch, which only the step function's loss keeps."""
    script = REPOSITORY / "notebooks" / "train_gpt.py"
    sizes = {"vocab-size": 60_000, "d-model": 32, "blocks": 2, "heads": 2, "context": 12, "batch-size": 16}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    parameters = json.dumps({"partitions": 2, "microbatches": 4})
    assert main(["plan", "--parameters", parameters, str(script), *options]) == 0
    row = re.search(r"^ +1  .*  ([\d.]+) MiB  ([\d.]+) MiB$", capsys.readouterr().out, re.MULTILINE)
    assert row is not None
    logits_bytes = 4 * 12 * 60_000 * 4
    assert float(row[1]) == pytest.approx(logits_bytes / 2**20, rel=0.05)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("planned:number", "must return an nn.Module"),
        ("planned:missing", "has no 'missing'"),
        ("planned:ends", "planned:ends ended by sys.exit() before a step"),
        ("planned:huge", "--input"),
        ("json:loads", "cannot be called without arguments (missing a required argument: 's')"),
        ("math:pi", "cannot be called without arguments (it is a float)"),
        ("no_such_package:f", "cannot be imported"),
        ("no_such_script.py", "is not a file"),
    ],
)
def test_bad_targets(target: str, message: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", FOUR, target]) == 2
    assert message in capsys.readouterr().err


def test_a_script_that_ends_well_without_a_step_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(0)\n")
    assert main(["plan", "--parameters", FOUR, str(script)]) == 2
    assert f"{script} ended by sys.exit() before a step" in capsys.readouterr().err
    script.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        main(["plan", "--parameters", FOUR, str(script)])


def test_auto_shows_what_was_tried_and_plans_with_the_best(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "alternatives.png"
    parameters = json.dumps({"partitions": 2, "microbatches": 4, "pipeline": "auto"})
    assert main(["plan", "--parameters", parameters, "--png", str(picture), f"{package}:blocks"]) == 0
    text = capsys.readouterr().out
    table, _, rest = text.partition("stage  modules")
    assert table.startswith("pipeline auto, by simulation of operations of the modules, counted:\n")
    taken = re.search(r"^(\w+), (.*?)  .* GFLOP .*  taken$", table, re.MULTILINE)
    assert taken and taken[2] in ("2 pieces", "4 pieces", "2 pieces, v")
    assert len(re.findall(r" GFLOP ", table)) == 10
    assert " | " in rest  # several pieces of a stage
    assert f"2 partitions, 4 microbatches, auto ({taken[1]}), optimize=memory" in rest
    # The bubble of the one is that of the recorded step, but for the loss and messages.
    idle = re.search(r"^idle +([\d.]+)% ", rest, re.MULTILINE)
    told = re.search(r"GFLOP +([\d.]+)% .*  taken$", table, re.MULTILINE)
    assert idle and told and float(idle[1]) == pytest.approx(float(told[1]), abs=5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_auto_with_one_partition_leaves_nothing_for_later(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"partitions": 1, "microbatches": 4, "pipeline": "auto"}
    assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:equal"]) == 0
    stage = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("stage 0 "))
    assert "B3" in stage and "W" not in stage


def test_auto_with_a_limit_that_nothing_keeps(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = {"partitions": 2, "microbatches": 4, "pipeline": "auto", "memory_limit": "1 MiB"}
    assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:equal"]) == 2
    said = capsys.readouterr().err
    assert "memory_limit=1048576 (1.0 MiB) is less than pipeline='auto' needs on a rank" in said
    assert "zero_bubble_v, 2 pieces, v" in said


def test_the_limit_that_would_do_does(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And where the peak of what is chosen is above it all the same, that is said."""
    parameters = {"partitions": 2, "microbatches": 4, "pipeline": "zero_bubble", "memory_limit": "1 MiB"}
    assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:blocks"]) == 2
    told = re.search(r"estimate; (\d+) would do", capsys.readouterr().err)
    assert told
    least = int(told[1])
    parameters["memory_limit"] = least - 1
    assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:blocks"]) == 2
    parameters["memory_limit"] = least
    capsys.readouterr()
    assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:blocks"]) == 0
    text = capsys.readouterr().out
    totals = re.findall(r"^ +\d  ([\d.]+) MiB +[BFW]\d", text, re.MULTILINE)
    assert len(totals) == 2
    assert ("above memory_limit" in text) == any(float(total) * 2**20 > least for total in totals)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"partitions": 1}, "with partitions=1 there is nothing to choose"),
        ({"shard_optimizer_state": True, "ddp": True}, ".* lie in pieces on several ranks"),
    ],
)
def test_a_limit_is_not_silent_where_nobody_looks_at_it(
    package: str, more: dict[str, object], reason: str
) -> None:
    parameters = {"partitions": 2, "microbatches": 4, "memory_limit": 1, **more}
    with pytest.warns(UserWarning, match=f"memory_limit=1 is not looked at: {reason}"):
        assert main(["plan", "--parameters", json.dumps(parameters), f"{package}:equal"]) == 0
