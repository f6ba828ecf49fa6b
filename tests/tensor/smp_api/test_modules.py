"""Models with distributed modules train as the dense model does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.cases import INNER, dense

pytestmark = pytest.mark.sampled(3)

BASE = {"microbatches": 2, "ddp": True, "partitions": 1}
WAYS = [(prescaled, optimize) for prescaled in (True, False) for optimize in ("speed", "memory")]


def parameters_of(degree: int, prescaled: bool, optimize: str, partitions: int = 1) -> dict[str, Any]:
    return {
        **BASE,
        "partitions": partitions,
        "tensor_parallel_degree": degree,
        "prescaled_batch": prescaled,
        "optimize": optimize,
    }


def check(
    model: str, world_size: int, parameters: dict[str, Any], dtype: torch.dtype = torch.float64
) -> list[dict[str, Any]]:
    kwargs = {"model_name": model, "parameters": parameters, "dtype": dtype}
    found = run_distributed("tests.tensor.smp_api.cases:train", world_size, kwargs=kwargs)
    expected = dense(model, 1 + max(rank["replica"] for rank in found), dtype)
    tolerance, sums = (1e-10, 1e-10) if dtype is torch.float64 else (1e-5, 1e-4)
    for rank in found:
        replica = rank["replica"]
        assert rank["losses"] == pytest.approx(expected["losses"][replica], rel=sums, abs=sums)
        for step, (mine, theirs) in enumerate(
            zip(rank["outputs"], expected["outputs"][replica], strict=True)
        ):
            near = sums if step else tolerance
            torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
        assert rank["state"].keys() == expected["state"].keys()
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, expected["state"][name], rtol=sums, atol=tolerance)
        for name, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=sums, atol=tolerance)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
def test_linears_and_embeddings(prescaled: bool, optimize: str) -> None:
    found = check("linears", 2, parameters_of(2, prescaled, optimize))
    assert all(rank["kinds"] == ["DistributedEmbedding", "DistributedLinear"] for rank in found)


@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
def test_a_vector_is_a_batch_of_one(prescaled: bool, optimize: str) -> None:
    check("vectors", 2, parameters_of(2, prescaled, optimize))


@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
def test_norms_by_themselves(prescaled: bool, optimize: str) -> None:
    found = check("normed", 2, parameters_of(2, prescaled, optimize))
    assert "DistributedLayerNorm" in found[0]["kinds"]


KINDS = {
    "attention": "DistributedAttentionLayer",
    "output": "DistributedTransformerOutputLayer",
    "layer": "DistributedTransformerLayer",
    "transformer": "DistributedTransformer",
}


QUICK = ("attention post", "layer cross", "transformer")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
@pytest.mark.parametrize(
    "model", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in INNER]
)
def test_transformer_modules(model: str, prescaled: bool, optimize: str) -> None:
    found = check(model, 2, parameters_of(2, prescaled, optimize))
    assert KINDS[model.split()[0]] in found[0]["kinds"]


@pytest.mark.ci
@pytest.mark.parametrize("model", ["linears", "transformer both"])
def test_degree_one(model: str) -> None:
    found = check(model, 1, parameters_of(1, False, "memory"))
    assert any(kind.startswith("Distributed") for kind in found[0]["kinds"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "prescaled", "optimize"),
    [
        ("linears", False, "speed"),
        ("transformer", False, "memory"),
        pytest.param("transformer", False, "speed", marks=pytest.mark.thorough),
        pytest.param("transformer", True, "speed", marks=pytest.mark.thorough),
    ],
)
def test_with_replicas(model: str, prescaled: bool, optimize: str) -> None:
    check(model, 4, parameters_of(2, prescaled, optimize))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prescaled", "optimize"),
    [(True, "memory"), (False, "speed"), *(pytest.param(*w, marks=pytest.mark.thorough) for w in WAYS[::3])],
)
def test_over_two_stages(prescaled: bool, optimize: str) -> None:
    check("transformer both", 4, parameters_of(2, prescaled, optimize, partitions=2))


def test_in_single_precision() -> None:
    check("transformer", 2, parameters_of(2, True, "memory"), torch.float32)


@pytest.mark.slow
def test_biases_of_heads_over_stages() -> None:
    """The cut goes through an attention layer, whose ranks add biases of their own heads."""
    check("attention post", 4, parameters_of(2, True, "memory", partitions=2))
