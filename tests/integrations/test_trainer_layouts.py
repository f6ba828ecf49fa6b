"""The Trainer over split layers, sharded parameters and adapters."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.integrations.comparing import CASES, assert_same, both

EVALUATED = {"eval_strategy": "epoch"}
ROUNDED = 2e-4
SHARDED = {
    "ici_mesh": {"fsdp": 2},
    "sharding": {
        "model.embed_tokens.weight": ["fsdp", None],
        "model.layers.*.self_attn.q_proj.weight": ["fsdp", None],
        "model.layers.*.mlp.up_proj.weight": ["fsdp", None],
        "model.layers.*.mlp.down_proj.weight": [None, "fsdp"],
        "lm_head.weight": ["fsdp", None],
    },
}
SPLIT = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.mark.thorough
def test_split_layers(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, SPLIT, 2, model="llama", predicts=True, saves=True, **EVALUATED)
    assert_same(plain, ours, ROUNDED)


@pytest.mark.thorough
def test_split_layers_resume(tmp_path: Path) -> None:
    arguments = {"model": "llama", "save_strategy": "epoch", "load_best_model_at_end": True, **EVALUATED}
    plain, ours = both(tmp_path, SPLIT, 2, **arguments)
    assert_same(plain, ours, ROUNDED)
    resumed = run_distributed(
        f"{CASES}:train",
        2,
        kwargs={"parameters": SPLIT, "folder": str(tmp_path / "ours"), "resumes": True, **arguments}
        | {"num_train_epochs": 3},
    )
    assert [log["step"] for log in resumed[0]["logs"] if "loss" in log] == list(range(1, 13))


@pytest.mark.ci
def test_sharded_parameters(tmp_path: Path) -> None:
    # The last batch has one row for two replicas, which gather each block's parameters together.
    plain, ours = both(tmp_path, SHARDED, 2, 2, rows=13, model="llama", predicts=True, **EVALUATED)
    assert_same(plain, ours, ROUNDED)


@pytest.mark.thorough
def test_sharded_parameters_resume_to_the_bit(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "parameters": SHARDED,
        "folder": str(tmp_path),
        "model": "llama",
        "batch": 2,
        "save_strategy": "epoch",
    }
    through = run_distributed(f"{CASES}:train", 2, kwargs=kwargs)
    for file in sorted((tmp_path / "checkpoint-8").rglob("*"), reverse=True):
        file.unlink()
    (tmp_path / "checkpoint-8").rmdir()
    resumed = run_distributed(f"{CASES}:train", 2, kwargs={**kwargs, "resumes": True})
    assert resumed[0]["logs"][:-1] == through[0]["logs"][:-1]
    assert all(torch.equal(t, through[0]["weights"][n]) for n, t in resumed[0]["weights"].items())


@pytest.mark.slow
@needs_peft
def test_adapters_are_trained_and_saved_alone(tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file

    from tests.integrations.trainer_models import gpt2

    arguments = {
        "model": "lora",
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "load_best_model_at_end": True,
        "saves": True,
    }
    plain, ours = both(tmp_path, {"partitions": 2}, 2, **arguments)
    assert_same(plain, ours)
    mine, theirs = (
        load_file(tmp_path / kind / "final" / "adapter_model.safetensors") for kind in ("ours", "plain")
    )
    assert mine.keys() == theirs.keys()
    assert all("lora" in key and torch.equal(mine[key], theirs[key]) for key in theirs)
    assert not (tmp_path / "ours" / "final" / "model.safetensors").exists()
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(gpt2(), str(tmp_path / "ours" / "final"))
    assert all(torch.equal(tensor, plain["weights"][name]) for name, tensor in loaded.state_dict().items())


@needs_peft
@pytest.mark.thorough
def test_adapters_over_replicas_and_resumed(tmp_path: Path) -> None:
    parameters = {"partitions": 2, "microbatches": 2, "ddp": True}
    arguments: dict[str, Any] = {"model": "lora", "save_strategy": "epoch"}
    plain, ours = both(tmp_path, parameters, 4, 2, **arguments)
    assert_same(plain, ours, ROUNDED)
    resumed = run_distributed(
        f"{CASES}:train",
        2,
        kwargs={
            "parameters": {"partitions": 2},
            "folder": str(tmp_path / "plain"),
            "resumes": True,
            "num_train_epochs": 3,
            **arguments,
        },
    )
    assert [log["step"] for log in resumed[0]["logs"] if "loss" in log] == list(range(1, 13))
