"""Full checkpoints of models that tensor parallelism has rewritten have a plain model's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.cases import MODELS, hf_loss
from tests.tensor.smp_api.test_modules import parameters_of


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("model", "partitions"), [("hf gpt2", 1), ("hf bert", 1), ("vocabulary gpt2", 2)])
def test_full_checkpoints_are_those_of_the_plain_model(model: str, partitions: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    plain = MODELS[model]()[0]
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    kwargs = {
        "model_name": model,
        "parameters": parameters_of(2, True, "memory", partitions),
        "folder": str(tmp_path),
    }
    before = hf_loss(model, plain.state_dict())
    for found in run_distributed("tests.tensor.smp_api.cases:checkpoints", 2 * partitions, kwargs=kwargs):
        assert found["losses"][0] == pytest.approx(before, rel=1e-5)
        assert found["losses"][1] < found["losses"][0] - 1e-3
        assert found["after"] == [*found["losses"]] * 2
        assert "load_state_dict: missing keys" in found["said"]
        assert found["names"] == sorted(torch.load(tmp_path / "own names.pt"))
    saved = torch.load(tmp_path / "names of old.pt")
    assert saved.keys() == plain.state_dict().keys() != torch.load(tmp_path / "own names.pt").keys()
    assert hf_loss(model, saved) == pytest.approx(found["losses"][1], rel=1e-5)
