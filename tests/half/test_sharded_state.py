"""``shard_optimizer_state``: the same training to the bit, a share of the state, and what scripts see of
it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.half import reference
from tests.half.cases import build, net
from tests.harness import run_distributed
from tests.tensor.runtime_cases import batches

CASES = "tests.half.cases"
PLAIN = {"partitions": 1, "ddp": True, "microbatches": 2}
ELEMENTS = sum(parameter.numel() for parameter in net().parameters())


def both(parameters: dict[str, Any], ranks: int = 2, **options: Any) -> Any:
    return [
        run_distributed(
            f"{CASES}:train",
            ranks,
            kwargs={"parameters": {**parameters, "shard_optimizer_state": sharded}, **options},
        )
        for sharded in (True, False)
    ]


VARIANTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "AdamW": (2, PLAIN, {"clip": 0.5}),
    "Adagrad": (2, PLAIN, {"optimizer": "Adagrad"}),
    "RMSprop": (2, PLAIN, {"optimizer": "RMSprop"}),
    "NAdam": (2, PLAIN, {"optimizer": "NAdam"}),
    "pipelines": (4, {**PLAIN, "partitions": 2}, {"clip": 0.5}),
    "three replicas": (3, PLAIN, {"options_of_net": {"tied": True}}),
    "plain loop": (2, PLAIN, {"outside": True}),
    "frozen": (2, PLAIN, {"options_of_net": {"frozen": True}}),
    "accumulated": (2, PLAIN, {"passes": 2, "options": {"backward_passes_per_step": 2}}),
    "tensor": (
        4,
        {**PLAIN, "tensor_parallel_degree": 2, "prescaled_batch": True},
        {"is_split": True, "clip": 0.5},
    ),
    "tensor, own batches": (
        4,
        {**PLAIN, "tensor_parallel_degree": 2, "prescaled_batch": True, "microbatches": 1},
        {"is_split": True, "outside": True},
    ),
    "horovod": (2, {"partitions": 1, "horovod": True}, {}),
    "bf16": (2, {**PLAIN, "bf16": True}, {"clip": 0.5}),
    "fp16": (2, {**PLAIN, "fp16": True}, {"clip": 0.5, "scaling": {"static_loss_scale": 512.0}}),
}


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_to_the_bit(variant: str) -> None:
    ranks, parameters, options = VARIANTS[variant]
    sharded, whole = both(parameters, ranks, **options)
    for mine, theirs in zip(sharded, whole, strict=True):
        for key in ("losses", "norms", "skipped", "scales"):
            assert mine[key] == theirs[key]
        for part in ("state", "masters"):
            assert mine[part].keys() == theirs[part].keys()
            for name, value in mine[part].items():
                assert torch.equal(value, theirs[part][name]), name
        # A whole state dict is that of one optimizer over the model.
        assert mine["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
        for position, entry in mine["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, theirs["optimizer"]["state"][position][key])


def test_each_replica_keeps_its_part_of_the_state() -> None:
    sharded, whole = both(PLAIN)
    num_parameters = len(list(net().parameters()))
    for mine, theirs in zip(sharded, whole, strict=True):
        assert theirs["elements"] == 2 * ELEMENTS
        assert ELEMENTS <= mine["elements"] <= ELEMENTS + num_parameters  # of two states, half each, padded


@pytest.mark.slow
def test_half_precision_with_shards_is_that_of_one_process_to_the_bit() -> None:
    scaling = {"dynamic_loss_scale": True, "init_scale": 2.0**20, "scale_window": 2}
    found = run_distributed(
        f"{CASES}:train",
        4,
        kwargs={
            "parameters": {**PLAIN, "partitions": 2, "fp16": True, "shard_optimizer_state": True},
            "scaling": scaling,
            "num_steps": 6,
            "clip": 0.5,
        },
    )
    expected = reference.train(
        net(),
        "fp16",
        batches(6),
        build=build,
        microbatches=2,
        init_scale=2.0**20,
        window=2,
        clip=0.5,
        others=batches(6, 1),
    )
    assert True in expected["skipped"] and False in expected["skipped"]
    for rank in found:
        assert (rank["norms"], rank["skipped"]) == (expected["norms"], expected["skipped"])
        for name, value in rank["masters"].items():
            assert torch.equal(value, expected["masters"][name]), name


def test_torchs_own_clipping_and_scaling_see_whole_gradients() -> None:
    sharded, whole = (
        run_distributed(
            f"{CASES}:scaled", 2, kwargs={"parameters": {**PLAIN, "shard_optimizer_state": is_sharded}}
        )
        for is_sharded in (True, False)
    )
    for mine, theirs in zip(sharded, whole, strict=True):
        assert mine["norms"] == theirs["norms"]
        assert all(torch.equal(value, theirs["state"][name]) for name, value in mine["state"].items())


def test_optimizers_of_whole_parameters_are_refused() -> None:
    for found in run_distributed(
        f"{CASES}:refusals", 2, kwargs={"parameters": {**PLAIN, "shard_optimizer_state": True}}
    ):
        for kind in ("Adafactor", "FusedLAMB", "FirstElement"):
            key = "own" if kind == "FirstElement" else kind
            assert re.match(
                f"SMPError: {kind} with shard_optimizer_state: tried on small tensors", found[key]
            )
        assert "Muon" not in found or "shard_optimizer_state" in found["Muon"]
        assert "LBFGS with shard_optimizer_state: it keeps the parameters as '_params'" in found["LBFGS"]


@pytest.mark.slow
def test_what_scripts_see_of_shards(tmp_path: Path) -> None:
    parameters = {**PLAIN, "shard_optimizer_state": True}
    found = run_distributed(f"{CASES}:views", 2, kwargs={"parameters": parameters, "path": str(tmp_path)})
    assert [rank["gathered"] for rank in found] == [2, False]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"all_0_0", "own_0_0_0", "own_0_0_1"}
    num_parameters = len(list(net().parameters()))
    for number, rank in enumerate(found):
        assert ELEMENTS / 2 <= rank["elements"] == rank["virtual"] <= (ELEMENTS + num_parameters) / 2
        assert sorted(rank["indices"]) == list(range(num_parameters))
        assert rank["raw"] and rank["again"] == [True, True]
        theirs, mine = f"shard {1 - number} of 2", f"shard {number} of 2"
        assert theirs in rank["other"] and mine in rank["other"]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("kind", "more", "changed"),
    [
        ("partial", {"fp16": True}, None),
        pytest.param("partial", {}, None, marks=pytest.mark.thorough),
        pytest.param("full", {"bf16": True}, None, marks=pytest.mark.thorough),
        ("full", {}, {"shard_optimizer_state": False}),
        pytest.param("portable", {}, None, marks=pytest.mark.thorough),
        ("portable", {}, {"shard_optimizer_state": False, "partitions": 2}),
        pytest.param("full", {"fp16": True}, {"partitions": 2}, marks=pytest.mark.thorough),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(
    tmp_path: Path, kind: str, more: dict[str, Any], changed: dict[str, Any] | None
) -> None:
    found = run_distributed(
        f"{CASES}:resume",
        2,
        kwargs={
            "parameters": {**PLAIN, "shard_optimizer_state": True, **more},
            "path": str(tmp_path),
            "kind": kind,
            "changed": changed,
            "scaling": {"static_loss_scale": 256.0},
        },
    )
    for rank in found:
        assert rank["resumed"] == rank["whole"] and rank["differs"] == []


def test_one_replica_alone_is_told_that_nothing_is_sharded() -> None:
    smp.reset()
    smp.init_in_memory({"partitions": 1, "shard_optimizer_state": True})
    model = smp.DistributedModel(net())
    with pytest.warns(UserWarning, match="shard_optimizer_state has no effect: there is one replica"):
        optimizer = smp.DistributedOptimizer(build(model.parameters()))
    parameter = next(model.parameters())
    assert optimizer.stand_in_of(parameter) is parameter
    smp.reset()


@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_the_state_of_a_parameter_without_dimensions_loads(more: dict[str, Any]) -> None:
    sharded, whole = (
        run_distributed(
            f"{CASES}:one_number",
            2,
            kwargs={"parameters": {**PLAIN, **more, "shard_optimizer_state": is_sharded}},
        )
        for is_sharded in (True, False)
    )
    for mine, theirs in zip(sharded, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
