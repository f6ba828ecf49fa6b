"""The Trainer of transformers 4.28.1 with its own support of SMP v1, as its users' scripts run it: it trains,
evaluates, saves and resumes as it does in plain torch.

That version clashes with ours, so it lives in a virtual environment of its own, named by
SMP_LITE_TRAINER4_VENV; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

VENV_VARIABLE = "SMP_LITE_TRAINER4_VENV"
SCRIPTS = Path(__file__).parent / "trainer4"
LIMIT_S = 60
"""A bound against hanging; a launch of four processes takes ten seconds."""

pytestmark = [
    pytest.mark.skipif(VENV_VARIABLE not in os.environ, reason=f"{VENV_VARIABLE} names no environment"),
    pytest.mark.timeout(5 * LIMIT_S),
]

PARAMETERS = {
    "partitions": 2,
    "microbatches": 2,
    "placement_strategy": "spread",
    "pipeline": "interleaved",
    "optimize": "speed",
    "ddp": True,
}
STEPS = 16
"""Two epochs of 64 samples, 8 in a step."""
STOP = 6
"""Within the first epoch: the Trainer finds its place in the data again."""

TRAINING = (
    "--no_cuda --disable_tqdm true --report_to none --do_train --do_eval --do_predict --num_train_epochs 2 "
    "--learning_rate 3e-3 --warmup_steps 3 --weight_decay 0.1 --adam_epsilon 1e-6 --max_grad_norm 0.5 "
    f"--logging_steps 1 --evaluation_strategy steps --eval_steps 4 --save_steps {STOP}"
).split()
BEST = ("--load_best_model_at_end", "true", "--metric_for_best_model", "accuracy")
OFTEN = ("--eval_steps", "1", "--save_steps", "1", "--save_total_limit", "2")


@dataclass(frozen=True)
class Run:
    """What a run of the script left behind."""

    folder: Path
    results: dict[str, Any] = field(repr=False)

    @property
    def steps(self) -> list[tuple[int, float, float]]:
        """(step, loss, learning rate)."""
        return [
            (entry["step"], entry["exact_loss"], entry["learning_rate"])
            for entry in self.results["history"]
            if "loss" in entry
        ]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Of training, then the one after it."""
        found = [entry for entry in self.results["history"] if "eval_loss" in entry]
        names = ("eval_loss", "eval_accuracy", "eval_probability")
        return [{name: entry[name] for name in names} for entry in [*found, self.results["metrics"]]]

    @property
    def logits(self) -> torch.Tensor:
        return torch.tensor(self.results["predictions"])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "pytorch_model.bin", weights_only=True)


def launch(folder: Path, processes: int, script: str, *arguments: str) -> None:
    """Runs a script under `smp-lite run`, or alone in plain torch where `processes` is 0."""
    environment = {
        # What the Trainer stores are Python objects, and it reads them as torch did before 2.6.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    programs = Path(os.environ[VENV_VARIABLE]) / "bin"
    command = [str(programs / "python")]
    if processes:
        command = [str(programs / "smp-lite"), "run", "--processes", str(processes)]
        command += ["--parameters", json.dumps(PARAMETERS)]
    process = subprocess.Popen(
        [*command, str(SCRIPTS / script), *arguments],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("SM_")}, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.terminate()  # for one that hangs: killed, it could not end its ranks
        process.wait()
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer4")


def train(folder: Path, processes: int, batch: int, *arguments: str) -> Run:
    """One run; `batch` is what one process of a replica takes at once."""
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    batches = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch}".split()
    output = ("--output_dir", str(folder), "--results", str(results))
    launch(folder, processes, "train.py", *output, *TRAINING, *batches, *arguments)
    return Run(folder, json.loads(results.read_text()))


def assert_equal(run: Run, plain: Run, *, losses: float = 0.0) -> None:
    """To the bit, but for the loss of an evaluation: a mean of means is rounded in another place.

    Args:
        losses: what the losses of steps may be off, relatively.
    """
    assert len(run.steps) == len(plain.steps) > 0
    for mine, wanted in zip(run.steps, plain.steps, strict=True):
        assert mine == pytest.approx(wanted, rel=losses, abs=0)
    assert len(run.evaluations) == len(plain.evaluations) > 1
    for mine, wanted in zip(run.evaluations, plain.evaluations, strict=True):
        assert mine.pop("eval_loss") == pytest.approx(wanted.pop("eval_loss"), rel=1e-6)
        assert mine == wanted
    assert run.logits.equal(plain.logits)
    assert list(run.weights) == list(plain.weights)
    assert [name for name, value in run.weights.items() if not value.equal(plain.weights[name])] == []


def assert_close(run: Run, plain: Run) -> None:
    """Within 1e-6, where sums are taken in another order."""
    assert len(run.steps) == len(plain.steps) > 0
    for mine, wanted in zip(run.steps, plain.steps, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-6)
    assert len(run.evaluations) == len(plain.evaluations) > 1
    for mine, wanted in zip(run.evaluations, plain.evaluations, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(run.logits, plain.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run.weights, plain.weights, rtol=1e-6, atol=1e-6)


# One replica: two processes, a stage each. One process sums as they do if it takes microbatches one by one.


@pytest.fixture(scope="module")
def pipeline(root: Path) -> Run:
    return train(root / "pipeline", 2, 8)


@pytest.fixture(scope="module")
def plain(root: Path) -> Run:
    return train(root / "plain", 0, 4, "--gradient_accumulation_steps", "2")


def test_all_is_as_in_plain_torch(pipeline: Run, plain: Run) -> None:
    assert_equal(pipeline, plain)
    losses = [loss for _, loss, _ in plain.steps]
    rates = [rate for _, _, rate in plain.steps]
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    assert rates.index(max(rates)) == 2  # the warm-up
    assert rates[-1] == 0


def test_a_saved_model_is_one_of_plain_transformers(pipeline: Run, root: Path) -> None:
    folder = root / "loaded"
    folder.mkdir()
    results = folder / "results.json"
    files = ("--model", str(pipeline.folder), "--output_dir", str(folder), "--results", str(results))
    arguments = ("--no_cuda", "--report_to", "none", "--do_predict", "--per_device_eval_batch_size", "4")
    launch(folder, 0, "train.py", *files, *arguments)
    assert torch.tensor(json.loads(results.read_text())["predictions"]).equal(pipeline.logits)


def test_a_resumed_training_goes_on(pipeline: Run, root: Path) -> None:
    folder = root / "resumed"
    stopped = train(folder, 2, 8, "--stop_after", str(STOP))
    assert stopped.steps == pipeline.steps[:STOP]
    assert_equal(
        train(folder, 2, 8, "--resume_from_checkpoint", str(folder / f"checkpoint-{STOP}")), pipeline
    )


def test_a_batch_taken_at_once_is_close(pipeline: Run, root: Path) -> None:
    assert_close(pipeline, train(root / "at once", 0, 8))


def test_gradients_that_accumulate(root: Path) -> None:
    """In one order; losses are first averaged over microbatches, then added up."""
    plain = train(root / "accumulated plain", 0, 4, "--gradient_accumulation_steps", "4")
    run = train(root / "accumulated", 2, 8, "--gradient_accumulation_steps", "2")
    assert len(run.steps) == STEPS // 2
    assert_equal(run, plain, losses=1e-6)


def test_the_best_model_comes_back(root: Path) -> None:
    plain = train(root / "best plain", 0, 4, "--gradient_accumulation_steps", "2", *BEST, *OFTEN)
    run = train(root / "best", 2, 8, *BEST, *OFTEN)
    assert_equal(run, plain)
    *before, after = (evaluation["eval_accuracy"] for evaluation in run.evaluations)
    best = before.index(max(before)) + 1
    assert best < STEPS
    assert before[best - 1] == after
    for each in (run, plain):
        kept = {path.name for path in each.folder.glob("checkpoint-*")}
        assert kept == {f"checkpoint-{best}", f"checkpoint-{STEPS}"}


# Two replicas: four processes. One process takes the samples of both in one batch, and sums in another order.


@pytest.fixture(scope="module")
def replicas(root: Path) -> Run:
    return train(root / "replicas", 4, 4)


def test_replicas_are_close_to_plain_torch(replicas: Run, root: Path) -> None:
    assert len(replicas.steps) == STEPS
    assert_close(replicas, train(root / "replicas plain", 0, 8, "--replicas_order"))


def test_a_resumed_training_of_replicas_goes_on(replicas: Run, root: Path) -> None:
    folder = root / "replicas resumed"
    checkpoint = folder / f"checkpoint-{STOP}"
    shutil.copytree(replicas.folder / checkpoint.name, checkpoint)
    assert_equal(train(folder, 4, 4, "--resume_from_checkpoint", str(checkpoint)), replicas)


def test_gradients_of_replicas_that_accumulate(root: Path) -> None:
    accumulating = ("--gradient_accumulation_steps", "2")
    run = train(root / "replicas accumulated", 4, 4, *accumulating)
    assert len(run.steps) == STEPS // 2
    assert_close(run, train(root / "replicas accumulated plain", 0, 8, "--replicas_order", *accumulating))


def test_a_step_function_in_the_body_of_a_trainer(root: Path) -> None:
    results = root / "step.json"
    launch(root, 2, "step_in_class.py", str(results), str(root / "step"))
    found = json.loads(results.read_text())
    assert len(set(found["losses"])) == 4
    assert found["losses"] == found["plain_losses"]
    assert found["unlike"] == []
