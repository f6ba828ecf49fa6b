"""fp16 and bf16 over real ranks train to the bit what plain torch trains by the same rules in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.half import reference
from tests.half.cases import build, net
from tests.harness import run_distributed
from tests.tensor.runtime_cases import batches

CASES = "tests.half.cases"
DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**20, "scale_window": 2}}
PIPELINE = {"partitions": 2, "microbatches": 2}
REPLICAS = {"partitions": 1, "ddp": True, "microbatches": 2}
BOTH = {"partitions": 2, "ddp": True, "microbatches": 2}


def on_ranks(mode: str, ranks: int, parameters: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    options = {"scaling": DYNAMIC, "clip": 0.5, **options}
    return run_distributed(
        f"{CASES}:train", ranks, kwargs={"parameters": {**parameters, mode: True}, **options}
    )


def plainly(mode: str, num_steps: int = 4, *, two: bool = False, **options: Any) -> dict[str, Any]:
    module = net(**options.pop("options_of_net", {}))
    scaling = {"init_scale": 2.0**20, "window": 2, "clip": 0.5, "microbatches": 2}
    passes = options.get("passes", 1)
    return reference.train(
        module,
        mode,
        batches(num_steps * passes),
        build=options.pop("build", build),
        others=batches(num_steps * passes, 1) if two else (),
        **{**scaling, **options},
    )


def check(found: list[dict[str, Any]], expected: dict[str, Any], *, of_scale: bool = True) -> None:
    """All ranks agree with the reference to the bit, each in what it has."""
    names = set()
    for rank in found:
        if rank["coordinate"][2] == 0:  # the loss of another replica is of its own batch
            assert rank["losses"] == expected["losses"]
        assert rank["norms"] == expected["norms"]
        assert rank["skipped"] == expected["skipped"]
        if rank["scales"] and of_scale:
            assert rank["scales"] == expected["scales"]
        for name, value in rank["state"].items():
            assert value.dtype == expected["state"][name].dtype
            assert torch.equal(value, expected["state"][name]), name
        for name, value in rank["masters"].items():
            if name in expected["masters"]:
                assert torch.equal(value, expected["masters"][name]), name
                names.add(name)
    assert names == expected["masters"].keys()


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_a_pipeline(mode: str) -> None:
    found = on_ranks(mode, 2, PIPELINE, num_steps=8)
    expected = plainly(mode, 8)
    check(found, expected)
    assert mode == "bf16" or (True in expected["skipped"] and len(set(expected["scales"])) > 2)


VARIANTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "replicas": (2, REPLICAS, {}),
    "replicas, plain loop": (2, {**REPLICAS, "microbatches": 1}, {"outside": True}),
    "pipelines and replicas": (4, BOTH, {}),
    "tied": (2, PIPELINE, {"options_of_net": {"tied": True}}),
    "frozen": (2, PIPELINE, {"options_of_net": {"frozen": True}}),
    "checkpointing": (2, PIPELINE, {"checkpointing": True}),
    "static mode": (2, {**PIPELINE, "static_mode": True}, {}),
    "simple": (2, {**PIPELINE, "pipeline": "simple"}, {"optimizer": "SGD"}),
    "accumulated": (2, PIPELINE, {"passes": 2}),
    "accumulated before a reduction": (
        2,
        REPLICAS,
        {"passes": 2, "options": {"backward_passes_per_step": 2}, "same_batch": True},
    ),
    "as views": (2, REPLICAS, {"options": {"gradient_as_bucket_view": True}}),
    "not clipped": (2, PIPELINE, {"clip": None}),
}


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, mode: str) -> None:
    ranks, parameters, options = VARIANTS[variant]
    found = on_ranks(mode, ranks, parameters, **options)
    of_reference = {key: options[key] for key in ("options_of_net", "passes", "clip") if key in options}
    if "optimizer" in options:
        of_reference["build"] = lambda parameters: build(parameters, options["optimizer"])
    two = parameters.get("ddp", False) and not options.get("same_batch", False)
    expected = plainly(mode, two=two, microbatches=parameters["microbatches"], **of_reference)
    check(found, expected)


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for poisoned in (1, 3):
        scaling = {"static_loss_scale": 1024.0}
        found = on_ranks("fp16", 4, BOTH, scaling=scaling, poison=[1], poisoned_rank=poisoned)
        for rank in found:
            assert rank["skipped"] == [False, True, False, False]
            assert rank["norms"][1] == -1.0 and min(rank["norms"][::2]) > 0
            assert rank["scales"] == [1024.0] * 4
            for name, value in rank["state"].items():
                assert torch.equal(value, found[0]["state"][name])


def test_long_sequences_of_scales_are_the_same_on_all_ranks() -> None:
    poison = [2, 3, 4, 9, 10, 17, 18, 19, 20]
    args = {"init_scale": 2.0**10, "scale_window": 3}
    scaling = {"dynamic_loss_scale": True, **args}
    found = on_ranks("fp16", 2, PIPELINE, scaling=scaling, num_steps=30, poison=poison)
    expected = plainly("fp16", 30, init_scale=2.0**10, window=3, poison=poison)
    check(found, expected)
    assert len(set(expected["scales"])) >= 5


def test_tensor_parallelism_is_close() -> None:
    parameters = {**REPLICAS, "tensor_parallel_degree": 2, "prescaled_batch": True}
    scaling = {"static_loss_scale": 256.0}
    found = on_ranks("fp16", 2, parameters, is_split=True, scaling=scaling, optimizer="SGD")
    expected = plainly("fp16", init_scale=256.0, window=None, build=lambda p: build(p, "SGD"))
    for rank in found:
        assert rank["skipped"] == [False] * 4
        assert rank["norms"] == pytest.approx(expected["norms"], rel=2e-3)
        torch.testing.assert_close(rank["masters"], expected["masters"], rtol=0.0, atol=1e-4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("mode", "kind", "changed"),
    [
        ("fp16", "partial", None),
        ("bf16", "full", None),
        pytest.param("fp16", "full", {"partitions": 1, "ddp": True}, marks=pytest.mark.thorough),
        pytest.param("bf16", "partial", None, marks=pytest.mark.thorough),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(
    tmp_path: Path, mode: str, kind: str, changed: dict[str, Any] | None
) -> None:
    found = run_distributed(
        f"{CASES}:resume",
        2,
        kwargs={
            "parameters": {**PIPELINE, mode: True},
            "path": str(tmp_path),
            "kind": kind,
            "changed": changed,
            "scaling": DYNAMIC,
        },
    )
    for rank in found:
        assert rank["resumed"] == rank["whole"]
        assert rank["differs"] == []
    names = {path.name for path in tmp_path.rglob("fp16_states*")}
    assert names == ({"fp16_states_0.pt", "fp16_states_1.pt"} if kind == "partial" else {"fp16_states_t"})
    saved = torch.load(sorted(tmp_path.rglob("fp16_states*"))[0])
    keys = {"loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "fp32_from_fp16"}
    assert keys <= saved.keys()
    assert all(master.dtype == torch.float32 for master in saved["fp32_from_fp16"].values())
