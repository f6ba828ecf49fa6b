"""What AWS's notebooks do with the GPT script, to its end: fine-tuning, sharded training, half precision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.smp_v1.gpt_script import SCRIPTS, gpt, pp, tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.slow
def test_fine_tuning_from_a_full_checkpoint_with_delayed_parameters(tmp_path: Path, data: Path) -> None:
    """What the file holds is trained on, and not what was drawn; on two stages as on one."""
    fine_tune = ["--fine_tune", "1"]
    one = gpt(tmp_path, data, 1, *pp(1, *fine_tune), steps=4)
    delayed = gpt(tmp_path, data, 2, *pp(2, *fine_tune, "--delayed_param", "1"), steps=4)
    assert delayed == one


@pytest.mark.thorough
def test_delayed_parameters_train_as_others(tmp_path: Path, data: Path) -> None:
    one = gpt(tmp_path, data, 1, *pp(1), steps=4)
    assert gpt(tmp_path, data, 2, *pp(2, "--delayed_param", "1"), steps=4) == one


SHARDED = ["--sharded_data_parallel_degree", "2", "--train_batch_size", "2", "--sdp_threshold", "100"]


@pytest.mark.slow
def test_sharded_training_and_conversion_to_one_file(tmp_path: Path, data: Path) -> None:
    saving = ["--checkpoint_freq", "4", "--save_final_full_model", "1", "--bf16", "1"]
    sharded = gpt(tmp_path, data, 2, *pp(1, *SHARDED, *saving, "--offload_activations", "1"), steps=4)
    whole = gpt(tmp_path, data, 2, *pp(1, "--train_batch_size", "2", "--bf16", "1"), steps=4)
    assert sharded["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-3)
    folder = tmp_path / "checkpoints" / "total_steps4_partial"
    assert {"model_0.pt", "optimizer_0.pt", "optimizer_1.pt", "user_content.pt"} <= set(os.listdir(folder))
    join = [sys.executable, str(SCRIPTS / "join_shards.py"), str(folder), str(tmp_path / "joined.pt")]
    subprocess.run(join, check=True)
    joined = torch.load(tmp_path / "joined.pt", weights_only=True)
    full = torch.load(tmp_path / "model" / "fullmodel.pt", weights_only=True)
    assert {name.removeprefix("module.") for name in joined} <= full.keys()
    for name, tensor in joined.items():
        assert torch.equal(tensor.to(full[name].dtype), full[name]), name


@pytest.mark.thorough
def test_sharded_training_resumes(tmp_path: Path, data: Path) -> None:
    saving = ["--checkpoint_freq", "2", "--bf16", "1"]
    whole = gpt(tmp_path, data, 2, *pp(1, *SHARDED, *saving), steps=6)
    (tmp_path / "checkpoints" / "newest").write_text("total_steps4_partial")
    again = gpt(tmp_path, data, 2, *pp(1, *SHARDED, "--bf16", "1", "--load_partial", "1"), steps=6)
    assert again["loss"] == whole["loss"][4:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_precision_with_accumulation_and_resume(tmp_path: Path, data: Path) -> None:
    """From a scale at which the first steps overflow, so that the checkpoint holds a scale in use."""
    half = ["--fp16", "1", "--init_scale", str(2.0**20), "--gradient_accumulation", "2"]
    whole = gpt(tmp_path, data, 2, *pp(2, *half, "--checkpoint_freq", "4"), steps=12)
    assert 0 < whole["overflows"] < 6
    assert -1 in whole["norms"]
    (tmp_path / "checkpoints" / "newest").write_text("total_steps8_partial")
    again = gpt(tmp_path, data, 2, *pp(2, *half, "--load_partial", "1"), steps=12)
    assert again["loss"] == whole["loss"][8:]
    one = gpt(tmp_path, data, 1, *pp(1, *half), steps=12)
    assert one == whole


@pytest.mark.thorough
def test_optimizer_state_in_shards_trains_alike(tmp_path: Path, data: Path) -> None:
    whole = gpt(tmp_path, data, 2, *pp(1, "--train_batch_size", "2"))
    shards = gpt(tmp_path, data, 2, *pp(1, "--train_batch_size", "2", "--shard_optimizer_state", "1"))
    assert shards == whole


@pytest.mark.thorough
def test_a_full_checkpoint_goes_on_elsewhere(tmp_path: Path, data: Path) -> None:
    gpt(tmp_path, data, 2, *pp(2, "--save_final_full_model", "1"), steps=2)
    one = gpt(tmp_path, data, 1, *pp(1, "--load_full", "1"), steps=4)
    assert gpt(tmp_path, data, 2, *pp(2, "--load_full", "1", "--delayed_param", "1"), steps=4) == one
