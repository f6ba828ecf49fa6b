"""Delayed initialization in real ranks: training goes as after plain construction, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed

_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"partitions": 2, "microbatches": 2, "ddp": True}),
    "replicas": (2, {"partitions": 1, "microbatches": 2, "ddp": True}),
    "tensor": (
        2,
        {
            "partitions": 1,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "prescaled_batch": True,
            "microbatches": 2,
        },
    ),
    "sharded": (2, {"partitions": 1, "sharded_data_parallel_degree": 2, "ddp": True, "microbatches": 2}),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("pipeline", "net"),
        ("replicas", "net"),
        ("tensor", "net"),
        ("sharded", "net"),
        ("pipeline", "recurrent"),
        ("pipeline", "gpt2"),
        ("tensor", "gpt2"),
        *[pytest.param("pipeline", kind, marks=pytest.mark.thorough) for kind in ("llama", "bert", "t5")],
    ],
)
def test_training_is_that_of_a_model_made_at_once(layout: str, kind: str) -> None:
    size, parameters = _LAYOUTS[layout]
    runs = [
        run_distributed(
            "tests.deferred.cases:train",
            size,
            kwargs={"parameters": parameters, "delay": delay, "kind": kind},
        )
        for delay in (False, True)
    ]
    for plain, delayed in zip(*runs, strict=True):
        assert torch.equal(plain["after"], delayed["after"])
        assert plain["losses"] == delayed["losses"]
        assert plain["state"].keys() == delayed["state"].keys()
        for key, value in plain["state"].items():
            assert torch.equal(value, delayed["state"][key]), key
        assert delayed["types"] == plain["types"] and delayed["left"] == 0
        assert delayed["same objects"] or not plain["same objects"]
        assert plain["waited"] == 0
        assert (delayed["waited"] > 0) == (layout not in ("replicas", "tensor"))


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_model_trains_that_is_larger_than_the_memory_of_a_rank() -> None:
    # 64 blocks of 8 MiB each; a rank holds a quarter, and gradients as large.
    sizes = {"width": 512, "num_blocks": 64, "mib": 330}
    case = {"function": "tests.deferred.cases:limited", "world_size": 4, "fresh": True, "timeout_s": 180}
    plain = run_distributed(**case, kwargs={"delay": False, **sizes})
    assert all("failed" in each for each in plain), plain
    delayed = run_distributed(**case, kwargs={"delay": True, **sizes})
    assert all("loss" in each for each in delayed), delayed
    assert sum(each["own"] for each in delayed) == delayed[0]["whole"]


@pytest.mark.parametrize("by_rank", [False, True])
def test_stages_must_be_about_to_make_one_model(by_rank: bool) -> None:
    size, parameters = _LAYOUTS["pipeline"]
    for told in run_distributed(
        "tests.deferred.cases:seeded", size, kwargs={"parameters": parameters, "by_rank": by_rank}
    ):
        if by_rank:
            assert "SMPMismatch: the parameter 'embed.weight', whose initialization is delayed" in told
        else:
            assert told == "ran"
