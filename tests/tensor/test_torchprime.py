"""torchprime's sharding files on unmodified models of transformers: equal to the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.torchprime_cases import dense

pytestmark = pytest.mark.sampled(3)

DATA = Path(__file__).parents[1] / "systems" / "data"

FILES: dict[str, tuple[str, int, tuple[str, ...], str]] = {
    "llama-fsdp": ("llama_fsdp.yaml", 2, ("ici_mesh.fsdp=2",), "llama"),
    "llama-fsdp-tp": ("llama_fsdp_tp.yaml", 4, (), "llama"),
    "mixtral-fsdp": (
        "mixtral_fsdp.yaml",
        2,
        (
            "ici_mesh.fsdp=2",
            "model.sharding.model.layers.*.mlp.experts.gate_up_proj=[null,fsdp,null]",
            "model.sharding.model.layers.*.mlp.experts.down_proj=[null,null,fsdp]",
        ),
        "mixtral",
    ),
    "tied": ("llama_fsdp.yaml", 2, ("ici_mesh.fsdp=2",), "tied"),
    "with a pipeline": (
        "llama_fsdp.yaml",
        4,
        ("ici_mesh.fsdp=2", "smp.pipeline_parallel_degree=2", "smp.microbatches=2"),
        "llama",
    ),
    "with data, tensor by override": (
        "llama_fsdp_tp.yaml",
        4,
        ("ici_mesh.data=2", "ici_mesh.fsdp=2", "ici_mesh.tensor=1"),
        "llama",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_a_model_like_one_process(name: str) -> None:
    file, ranks, overrides, model = FILES[name]
    kwargs = {"file": str(DATA / file), "overrides": overrides, "model": model}
    found = run_distributed("tests.tensor.torchprime_cases:train", ranks, kwargs=kwargs)
    expected = dense(model, max(rank["replica"] for rank in found) + 1)
    whole = sum(tensor.numel() for tensor in expected["state"].values())
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=1e-5)
        assert list(rank["state"]) == list(expected["state"])
        torch.testing.assert_close(rank["state"], dict(expected["state"]), rtol=1e-4, atol=1e-5)
        assert rank["units"] >= 2
        assert rank["elements"] < 0.8 * whole


@pytest.mark.ci
def test_pieces_and_dtensors_by_the_same_rules_have_the_same_gradients(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "file": str(DATA / "llama_fsdp.yaml"),
        "overrides": ("ici_mesh.fsdp=2",),
        "store": str(tmp_path / "store"),
    }
    for rank in run_distributed("tests.tensor.torchprime_cases:both_roads", 2, kwargs=kwargs, timeout_s=100):
        if "refused" in rank:
            pytest.skip(rank["refused"])
        loss, by_dtensor = rank["losses"]
        assert loss == pytest.approx(by_dtensor, rel=1e-6)
        assert rank["gradients"].keys() == rank["by_dtensor"].keys()
        torch.testing.assert_close(rank["gradients"], rank["by_dtensor"], rtol=1e-4, atol=1e-6)
