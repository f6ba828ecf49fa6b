"""Where a delayed model's numbers come from beside its constructor: checkpoints, modules' own rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.deferred import cases
from tests.harness import run_distributed

_TWO = {"partitions": 2, "microbatches": 2, "ddp": False}


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["fullmodel.pt", "one", "several", "several/model.safetensors.index.json"])
def test_a_whole_checkpoint_is_loaded_tensor_by_tensor(tag: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = cases.build(False, "gpt2")
    if tag == "fullmodel.pt":
        torch.save(plain.state_dict(), tmp_path / tag)
    else:
        size = "20KB" if tag.startswith("several") else "5GB"
        plain.save_pretrained(tmp_path / tag.partition("/")[0], max_shard_size=size)  # type: ignore[operator]
    folder, _, name = str(tmp_path / tag).rpartition("/")
    for found in run_distributed(
        "tests.deferred.cases:load",
        2,
        kwargs={"parameters": _TWO, "folder": folder, "tag": name},
        timeout_s=180,  # imports, first
    ):
        assert found["waited"] > 0
        for key, value in plain.state_dict().items():
            assert torch.equal(value, found["state"][key]), key


def test_a_model_on_meta_is_initialized_by_its_modules() -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    after = torch.get_rng_state()
    for found in run_distributed("tests.deferred.cases:meta", 2, kwargs={"parameters": _TWO}):
        assert torch.equal(after, found["after"])
        for key, value in plain.state_dict().items():
            assert torch.equal(value, found["state"][key]), key


def test_what_nothing_initializes_is_named() -> None:
    for found in run_distributed("tests.deferred.cases:meta", 2, kwargs={"parameters": _TWO, "bare": True}):
        assert "0.extra of a model that was built on the meta device" in found["error"]


def test_names_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    torch.save({"strange": torch.ones(2)}, tmp_path / "model.pt")
    smp.init_in_memory({"partitions": 2, "microbatches": 2})
    smp.DistributedModel(cases.build(True))
    with pytest.raises(smp.SMPError, match="strange"):
        smp.resume_from_checkpoint(tmp_path, tag="model.pt", partial=False)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_whole_checkpoint_is_loaded_into_parameters_made_of_numbers(zipped: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = cases.Scaled()
    with torch.no_grad():
        plain.scale.fill_(7.0)
    torch.save(plain.state_dict(), tmp_path / "t", _use_new_zipfile_serialization=zipped)
    smp.init_in_memory({"partitions": 2})
    with smp.delay_param_initialization():
        net = cases.Scaled()
    model = smp.DistributedModel(net)
    smp.resume_from_checkpoint(tmp_path, "t", partial=False, load_optimizer=False)

    @smp.step
    def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    evaluate(model, torch.ones(2, 4))
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
