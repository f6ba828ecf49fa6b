"""Colossal-AI's API on this runtime: the documentation's snippets train as one process does."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_distributed
from tests.tensor import colossal_snippets as snippets

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.colossal_snippets"
MY_MODEL: dict[str, Any] = {"type": "MyModel", "hidden": snippets.HIDDEN, "depth": 4}


def parallel(**sizes: Any) -> dict[str, Any]:
    return {"parallel": sizes}


def built(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"model": model, "options": options}


def my_model() -> nn.Module:
    model = snippets.MyModel(snippets.HIDDEN, 4)
    model.build_from_cfg()
    return model


def check(found: list[dict[str, Any]], make: Any, limit: float = 1e-5) -> None:
    """Results on the last stage, nothing elsewhere, and all parameters at the end."""
    expected = snippets.in_one_process(make, found[0]["num_replicas"])
    held = set()
    for rank in found:
        for results, reference in zip(rank["results"], expected["results"][rank["replica"]], strict=True):
            if not rank["is_last"]:
                assert results == (None, None, None)
                continue
            for value, other in zip(results, reference, strict=True):
                torch.testing.assert_close(value, other, rtol=limit, atol=limit)
        output, label, loss = rank["evaluated"]
        assert loss is None
        if rank["is_last"]:
            other, labels = expected["evaluated"][rank["replica"]]
            torch.testing.assert_close(output, other, rtol=limit, atol=limit)
            assert torch.equal(label, labels)
        for name, value in rank["parameters"].items():
            held.add(name)
            assert (value - expected["parameters"][name]).abs().max() < limit, name
    assert held == set(expected["parameters"])


@pytest.mark.parametrize(
    ("ranks", "config", "options", "counts"),
    [
        (4, parallel(pipeline=2), {}, {"num_microbatches": 4}),
        pytest.param(
            4,
            parallel(pipeline={"size": 4}) | {"gradient_handler": []},
            {"partition_method": "layer", "verbose": True},
            {"num_microbatches": 2},
            marks=pytest.mark.thorough,
        ),
        (
            4,
            parallel(pipeline=2)
            | {
                "gradient_handler": [
                    {"type": "DataParallelGradientHandler"},
                    {"type": "PipelineSharedModuleGradientHandler"},
                ],
                "clip_grad_norm": 0.0,
            },
            {"num_chunks": 2, "partition_method": "layer"},
            {"num_microbatches": 4, "num_model_chunks": 2},
        ),
        pytest.param(4, {}, {}, {"num_microbatches": 2}, marks=pytest.mark.thorough),
    ],
)
def test_a_model_from_a_configuration_trains_as_in_one_process(
    ranks: int, config: Any, options: dict[str, Any], counts: dict[str, int]
) -> None:
    kwargs = {"config": config, "built": built(MY_MODEL, **options), **counts}
    found = run_distributed(f"{CASES}:train", ranks, kwargs=kwargs)
    check(found, my_model)
    if options.get("num_chunks") == 2:
        assert found[0]["layers"] == [0, 3] and found[2 // 2]["layers"] == [1, 2, 4, 5]


def test_a_sequential_trains_as_in_one_process() -> None:
    kwargs = {
        "config": parallel(pipeline=2),
        "built": built({"layers": 8}, num_chunks=2),
        "num_microbatches": 4,
        "num_model_chunks": 2,
    }
    found = run_distributed(f"{CASES}:train", 4, kwargs=kwargs)
    check(found, lambda: snippets.sequential(8))
    assert [rank["layers"] for rank in found] == [[0, 1, 4, 5], [2, 3, 6, 7]] * 2


KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "Linear1D_Col": (
        4,
        {"size": 2, "mode": "1d"},
        {"options": [{"gather_output": True}] * 4, "last": {}},
    ),
    "Linear1D_Row": (4, {"size": 2, "mode": "1d"}, {"options": [{}] * 4, "last": {}}),
    "Linear2D": (4, {"size": 4, "mode": "2d"}, {"options": [{}] * 4, "last": {}}),
    "Linear2p5D": (4, {"size": 2, "mode": "2.5d", "depth": 2}, {"options": [{}] * 4, "last": {}}),
    "Linear3D": (
        8,
        {"size": 8, "mode": "3d"},
        {"options": [{"layout": "in"}, {"layout": "out"}] * 2, "last": {"layout": "in"}},
    ),
}


def test_ordinary_layers_are_split_and_dealt_out() -> None:
    config = parallel(pipeline=2, tensor={"size": 2, "mode": "1d"})
    kwargs = {"config": config, "built": built({"blocks": 2}), "num_microbatches": 2}
    found = run_distributed(f"{CASES}:train", 4, kwargs=kwargs)
    check(found, snippets.blocks)
    assert [rank["layers"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_what_the_script_has_placed_stays_there() -> None:
    kwargs = {"config": parallel(pipeline=2) | {"partition_method": "layer"}}
    assert run_distributed(f"{CASES}:placed_by_the_script", 4, kwargs=kwargs) == [[1, 1, 1, 1]] * 4


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_layers_under_their_names_in_colossal(kind: str) -> None:
    ranks, tensor, more = KINDS[kind]
    pipeline = 2 if tensor["size"] == 2 else 1
    model = {"type": "InTwoDimensions", "kind": kind, **more}
    kwargs = {
        "config": parallel(pipeline=pipeline, tensor=tensor),
        "built": built(model),
        "num_microbatches": 2,
    }
    found = run_distributed(f"{CASES}:train", ranks, kwargs=kwargs)

    def dense() -> nn.Module:
        sizes = [snippets.FEATURES, snippets.HIDDEN, snippets.HIDDEN, snippets.CLASSES, snippets.CLASSES]
        layers: list[nn.Module] = [nn.Identity()]
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.Tanh()]
        named = nn.Module()
        named.layers = nn.Sequential(*layers)
        named.forward = named.layers.forward
        return named

    check(found, dense)


@pytest.mark.parametrize(
    ("model", "options", "homes"),
    [
        ({"layers": 10}, {}, [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]),
        ({"layers": 8}, {"num_chunks": 2}, [0, 1, 2, 3, 0, 1, 2, 3]),
        # Parameters 20, 30, 30, 30, 30, 45 (of 4 x 5 ... with hidden 5).
        ({"type": "MyModel", "hidden": 5, "depth": 6}, {}, [0, 0, 1, 1, 2, 2, 3, 3]),
        (
            {"type": "MyModel", "hidden": 5, "depth": 6},
            {"partition_method": "layer"},
            [0, 0, 1, 1, 2, 2, 3, 3],
        ),
    ],
)
def test_layers_are_dealt_out(model: dict[str, Any], options: dict[str, Any], homes: list[int]) -> None:
    kwargs = {"config": parallel(pipeline=4), "built": built(model, **options)}
    assert run_distributed(f"{CASES}:where", 4, kwargs=kwargs) == [homes] * 4


def test_global_context() -> None:
    config = parallel(pipeline=2, tensor={"size": 2, "mode": "1d"})
    found = run_distributed(f"{CASES}:ranks_of", 4, kwargs={"config": config})
    assert len({rank.pop("drawn") for rank in found}) == 1  # all ranks draw alike
    assert found[1] == {
        "GLOBAL": (1, [0, 1, 2, 3]),
        "DATA": (0, [1]),
        "MODEL": (1, [0, 1, 2, 3]),
        "PIPELINE": (0, [1, 3]),
        "TENSOR": (1, [0, 1]),
        "PARALLEL_1D": (1, [0, 1]),
    }
    config = parallel(tensor={"size": 4, "mode": "2d"})
    found = run_distributed(f"{CASES}:ranks_of", 4, kwargs={"config": config})
    assert found[2]["PARALLEL_2D_ROW"] == (0, [2, 3])
    assert found[2]["PARALLEL_2D_COL"] == (1, [0, 2])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("before launch", r"build_pipeline_model: start the job first, with launch\(config\)"),
        ("not colossal", r"belongs to configurations of Colossal-AI"),
        ("world size", r"launch\(world_size=8\): the launcher says 4"),
        ("handlers", r"nothing would reduce gradients over the 2 replicas.*DataParallelGradientHandler"),
        ("2d layer", r"Linear2D needs mode '2d' in parallel\.tensor, which has '1d'"),
        ("3d layer", r"Linear3D needs layout='in' or layout='out'"),
        ("group", r"get_local_rank\(ParallelMode\.PARALLEL_2D_ROW\): this job has no such groups"),
        ("method", r"partition_method='flops': it is 'parameter' or 'layer'"),
        ("method said twice", r"dealt out by parameter, and the configuration says another partition_method"),
        ("unknown model", r"type='MyModle' is in no MODELS registry: did you mean 'MyModel'"),
        ("unknown argument", r"MODELS: .*cannot be made: .*width"),
        ("empty", r"stage 0 would be empty: 1 layers over 2 stages \(parallel\.pipeline\)"),
        ("chunks do not divide", r"7 layers are not a multiple of num_model_chunks=2"),
        ("no sequential", r"takes a torch\.nn\.Sequential, got Linear"),
        ("split by hand", r"initialize got another model on some ranks.*build_pipeline_model"),
        ("other parameters", r"the optimizer holds a parameter that is not the model's"),
        ("m", r"num_microbatches=3 must be a multiple of the pipeline size 2; for example 4"),
        (
            "said twice",
            r"PipelineSchedule\(num_microbatches=4\), and the configuration has num_microbatches=2",
        ),
        ("chunks said twice", r"num_chunks=1, and the configuration has num_model_chunks=2"),
        ("plain schedule", r"PipelineSchedule is for 1 chunk\(s\).*has 2.*InterleavedPipelineSchedule"),
        ("chunks", r"is for 2 chunk\(s\) on each pipeline rank, and the model has 1"),
        ("no iterator", r"takes an iterator of batches, got DataLoader"),
        ("no pair", r"a batch is a pair of data and label, got a Tensor"),
        ("no loss", r"return_loss=False needs forward_only=True"),
        ("batch", r"has 8 samples on axis 0, which microbatches=3 does not divide"),
    ],
)
def test_misuse_is_an_error_with_the_way_out(kind: str, text: str) -> None:
    for told in run_distributed(f"{CASES}:told", 4, kwargs={"kind": kind}):
        assert re.search(text, told), told
