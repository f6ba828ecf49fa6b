"""Whole scripts of SMP v1, with no line of smp_lite in them, run by ``smp-lite run``.

They make the calls of AWS's GPT training script and of the container's mnist script, in their order. Losses
are compared with those of the same script on one partition.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.launching import launch
from tests.smp_v1.gpt_script import SCRIPTS, gpt, pp, tokens

MANUAL = ["--manual_partition", "1"]
thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens(tmp_path_factory.mktemp("tokens"))


ACCUMULATING = ["--gradient_accumulation", "2", "--logits_output", "logits.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([*ACCUMULATING, *MANUAL], id="gpt2, accumulating, manual"),
        pytest.param(["--model_type", "gpt_neox", "--validation_freq", "2"], id="gpt_neox", marks=thorough),
        pytest.param(
            ["--model_type", "bloom", "--activation_checkpointing", "0"], id="bloom", marks=thorough
        ),
        pytest.param(["--microbatches", "2", "--skip_tracing", "1"], id="microbatches", marks=thorough),
    ],
)
def test_a_gpt_trains_as_on_one_partition(tmp_path: Path, data: Path, options: list[str]) -> None:
    one = gpt(tmp_path, data, 1, *pp(1, *options))
    two = gpt(tmp_path, data, 2, *pp(2, *options))
    assert len(one["loss"]) == 6
    assert two == one


@thorough
def test_replicas_share_the_data(tmp_path: Path, data: Path) -> None:
    """Samples are dealt to the replicas in turn, so that both orders make the same batches."""
    one = gpt(tmp_path, data, 1, *pp(1))
    two = gpt(tmp_path, data, 2, *pp(1, "--train_batch_size", "2"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    four = gpt(tmp_path, data, 4, *pp(2, "--train_batch_size", "2"))
    assert four["loss"] == two["loss"]


@thorough
def test_a_gpt_resumes_from_its_checkpoints(tmp_path: Path, data: Path) -> None:
    """With a configuration of transformers among the user's content, read as scripts of torch 1 do."""
    whole = gpt(tmp_path, data, 2, *pp(2, "--checkpoint_freq", "2", "--num_kept_checkpoints", "2"), steps=6)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "newest",
        "total_steps4_partial",
        "total_steps6_partial",
    ]
    assert (tmp_path / "checkpoints" / "newest").read_text() == "total_steps6_partial"
    (tmp_path / "checkpoints" / "newest").write_text("total_steps4_partial")
    again = gpt(tmp_path, data, 2, *pp(2, "--load_partial", "1", "--save_final_full_model", "1"), steps=6)
    assert again["loss"] == whole["loss"][4:]
    state = torch.load(tmp_path / "model" / "fullmodel.pt", weights_only=True)
    assert state["transformer.h.3.mlp.c_fc.weight"].shape == (16, 64)


# mnist ----------------------------------------------------------------------------------------------------


def mnist(folder: Path, processes: int, parameters: dict[str, Any], *args: str) -> list[str]:
    """The last line of every rank, without its number."""
    script = str(SCRIPTS / "train_mnist.py")
    given = ["--processes", str(processes), "--parameters", json.dumps(parameters), "--cuda-as-cpu"]
    ended = launch(folder, *given, script, *args)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = [line for line in ended.stdout.splitlines() if "test loss" in line]
    assert len(found) == processes
    return sorted({line.partition(": ")[2] for line in found})


@pytest.mark.slow
def test_mnist_trains_and_goes_on_from_both_kinds_of_checkpoint(tmp_path: Path) -> None:
    one = mnist(tmp_path, 1, {"partitions": 1, "microbatches": 2})
    parameters = {"partitions": 2, "microbatches": 2}
    two = mnist(tmp_path, 2, parameters, "--assert-losses", "1", "--save-full-model", "--save-partial-model")
    assert two == one
    assert sorted(os.listdir(tmp_path)) == [f"pt_mnist_checkpoint.pt{end}" for end in ("", "_0", "_1")]
    partial = mnist(
        tmp_path, 2, parameters, "--epochs", "1", "--partial-checkpoint", "pt_mnist_checkpoint.pt"
    )
    full = mnist(tmp_path, 2, parameters, "--epochs", "1", "--full-checkpoint", "pt_mnist_checkpoint.pt")
    assert partial == full != two


@thorough
@pytest.mark.parametrize(
    ("processes", "parameters", "args"),
    [
        (4, {"partitions": 2, "microbatches": 2, "ddp": True}, ["--ddp", "1"]),
        (4, {"partitions": 4, "microbatches": 4, "ddp": 1, "placement_strategy": "spread"}, []),
        (2, {"partitions": 2, "microbatches": 2, "tensor_parallel_degree": 1}, ["--amp", "1"]),
    ],
)
def test_mnist_in_other_layouts(
    tmp_path: Path, processes: int, parameters: dict[str, Any], args: list[str]
) -> None:
    assert len(mnist(tmp_path, processes, parameters, "--assert-losses", "1", *args)) == 1
