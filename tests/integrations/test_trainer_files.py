"""Checkpoints of the Trainer: whole, as the plain Trainer's, and resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.harness import run_distributed
from tests.integrations.comparing import CASES, assert_same
from tests.integrations.trainer_cases import train

PIPELINE = {"partitions": 2}
STEPS = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
"""Of 14 rows in batches of 4 there are 4 steps in an epoch."""


def in_ranks(ranks: int, parameters: dict[str, Any], folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    return run_distributed(
        f"{CASES}:train",
        ranks,
        kwargs={"parameters": parameters, "folder": str(folder), **arguments},
        timeout_s=100,
    )


def keep_until(folder: Path, step: int) -> None:
    """As if the job had ended after that step."""
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            for file in sorted(checkpoint.rglob("*"), reverse=True):
                file.unlink()
            checkpoint.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"model": "gpt2-dropout", "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine"},
        {"model": "t5", "bf16": True, "use_cpu": True},
        {"model": "gpt2", "optim": "adafactor", "max_steps": 8},
    ],
)
@pytest.mark.sampled(3)
def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    through = in_ranks(2, PIPELINE, tmp_path, **STEPS, **arguments)
    keep_until(tmp_path, 6)
    resumed = in_ranks(2, PIPELINE, tmp_path, resumes=True, **STEPS, **arguments)
    for one, other in zip(through, resumed, strict=True):
        assert one["logs"][:-1] == other["logs"][:-1]  # the last is of the whole training
        for name, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


@pytest.mark.slow
def test_a_training_on_a_stream_resumes_as_the_plain_one(tmp_path: Path) -> None:
    """Which does not go on where it was: transformers 5.23 begins the epoch of a stream anew."""
    arguments = {"model": "gpt2", "is_stream": True, "max_steps": 8, **STEPS}
    train(None, str(tmp_path / "plain"), **arguments)
    in_ranks(2, PIPELINE, tmp_path / "ours", **arguments)
    for kind in ("plain", "ours"):
        keep_until(tmp_path / kind, 6)
    plain = train(None, str(tmp_path / "plain"), resumes=True, **arguments)
    assert_same(plain, in_ranks(2, PIPELINE, tmp_path / "ours", resumes=True, **arguments))


@pytest.mark.ci
def test_the_files_are_the_plain_trainers(tmp_path: Path) -> None:
    plain = train(None, str(tmp_path / "plain"), saves=True, **STEPS)
    ours = in_ranks(2, PIPELINE, tmp_path / "ours", saves=True, **STEPS)
    assert_same(plain, ours)
    names = [
        {str(file.relative_to(tmp_path / kind)) for file in (tmp_path / kind).rglob("*") if file.is_file()}
        for kind in ("plain", "ours")
    ]
    assert names[0] == names[1]
    for name in ("final/model.safetensors", "checkpoint-4/model.safetensors"):
        mine, theirs = (load_file(tmp_path / kind / name) for kind in ("ours", "plain"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    mine, theirs = (
        torch.load(tmp_path / kind / "checkpoint-4" / "optimizer.pt", weights_only=True)
        for kind in ("ours", "plain")
    )
    assert mine["param_groups"] == theirs["param_groups"]
    for key, state in theirs["state"].items():
        assert all(torch.equal(mine["state"][key][name], value) for name, value in state.items())
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / "final")
    assert all(torch.equal(t, plain["weights"][name]) for name, t in loaded.state_dict().items())
    args = torch.load(tmp_path / "ours" / "final" / "training_args.bin", weights_only=False)
    assert type(args) is transformers.TrainingArguments
    assert args.train_batch_size == 4
    state = json.loads((tmp_path / "ours" / "trainer_state.json").read_text())
    assert state["global_step"] == 8


@pytest.mark.parametrize("saved_by", ["plain", "ours"])
@pytest.mark.thorough
def test_the_plain_trainer_and_this_one_resume_each_others_checkpoints(tmp_path: Path, saved_by: str) -> None:
    through = train(None, str(tmp_path / "whole"), **STEPS)
    if saved_by == "plain":
        train(None, str(tmp_path / "half"), **STEPS)
        keep_until(tmp_path / "half", 4)
        resumed = in_ranks(2, PIPELINE, tmp_path / "half", resumes=True, **STEPS)
    else:
        in_ranks(2, PIPELINE, tmp_path / "half", **STEPS)
        keep_until(tmp_path / "half", 4)
        resumed = [train(None, str(tmp_path / "half"), resumes=True, **STEPS)]
    for found in resumed:
        assert found["logs"][:-1] == through["logs"][:-1]
        assert all(torch.equal(t, through["weights"][name]) for name, t in found["weights"].items())


@pytest.mark.thorough
def test_a_checkpoint_resumes_on_other_ranks(tmp_path: Path) -> None:
    through = train(None, str(tmp_path / "whole"), **STEPS)
    in_ranks(2, PIPELINE, tmp_path / "half", **STEPS)
    keep_until(tmp_path / "half", 4)
    parameters = {"partitions": 2, "microbatches": 2, "ddp": True}
    for found in in_ranks(4, parameters, tmp_path / "half", resumes=True, batch=2, **STEPS):
        for name, tensor in through["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_the_best_model_comes_back_and_old_checkpoints_go(tmp_path: Path) -> None:
    arguments = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mean",
        "greater_is_better": True,
        "save_total_limit": 2,
        "predicts": True,
    }
    plain = train(None, str(tmp_path / "plain"), **arguments)
    ours = in_ranks(2, PIPELINE, tmp_path / "ours", **arguments)
    assert_same(plain, ours)
    kept = [sorted(p.name for p in (tmp_path / kind).glob("checkpoint-*")) for kind in ("plain", "ours")]
    assert kept[0] == kept[1] and len(kept[0]) == 2


@pytest.mark.thorough
def test_saving_the_best_alone(tmp_path: Path) -> None:
    arguments = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "save_only_model": True,
    }
    assert_same(
        train(None, str(tmp_path / "plain"), **arguments),
        in_ranks(2, PIPELINE, tmp_path / "ours", **arguments),
    )
