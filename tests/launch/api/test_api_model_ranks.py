"""Model and optimizer on real ranks: what is local, what is gathered, what can be loaded where."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed

CASES = "tests.launch.api.api_model_cases:"
MANUAL = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}
WHEN = pytest.mark.parametrize("partitioned", [False, True], ids=["before", "after"])

PARTS = [
    ["first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias"],
    ["last.0.weight", "last.0.bias", "last.1.weight", "last.1.bias"],
]
BUFFERS = [
    [f"{name}.{kind}" for kind in ("running_mean", "running_var", "num_batches_tracked")]
    for name in ("first.1", "last.0")
]


def run(case: str, world_size: int = 2, **kwargs: Any) -> list[Any]:
    parameters = {**MANUAL, **({"ddp": True} if world_size > 2 else {})}
    return run_distributed(f"{CASES}{case}", world_size, kwargs=kwargs, parameters=parameters)


def test_each_rank_holds_its_stage_and_nothing_of_the_other() -> None:
    for rank, seen in enumerate(run("local_things")):
        everything = [*PARTS[0], *PARTS[1]]
        assert seen["all"] == seen["before"][0] == everything
        assert set(seen["before"][1]) == {*everything, *BUFFERS[0], *BUFFERS[1], "_smp_is_partial"}
        assert seen["parameters"] == seen["gradients"] == PARTS[rank]
        assert seen["memoryless"] == PARTS[1 - rank]
        assert seen["same objects"]
        assert seen["buffers"] == BUFFERS[rank]
        names = [["", "first", "first.0", "first.1"], ["last", "last.0", "last.1"]]
        assert seen["modules"] == names[rank]
        assert set(seen["state"]) == {*PARTS[rank], *BUFFERS[rank], "_smp_is_partial"}


def test_states_are_the_plain_ones_and_gathered_to_rank_0_on_request() -> None:
    for rank, seen in enumerate(run("state_dicts")):
        assert seen["model"]
        assert seen["order"]
        assert seen["optimizer"]
        assert seen["gathered"] == ([14, 14, 2] if rank == 0 else [0, 0, 0])
        assert seen["local positions"] == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]


@WHEN
def test_states_of_plain_torch_are_loaded(partitioned: bool) -> None:
    assert run("load_plain_states", partitioned=partitioned) == [True, True]


@WHEN
def test_parts_are_merged_into_another_partition(partitioned: bool) -> None:
    for seen in run("merge_parts", partitioned=partitioned):
        assert seen["merged"]
        assert "saved on another rank or with another partition" in seen["optimizer"]


@WHEN
def test_each_rank_loads_its_own_part_and_trains_on(partitioned: bool) -> None:
    for seen in run("load_own_parts", partitioned=partitioned):
        assert seen == {"lr": 0.03, "same": True}


def test_a_part_with_a_missing_key_is_an_error_on_its_rank() -> None:
    assert run("strictness") == [
        {
            name: f"SMPError: load_state_dict: missing keys ['{name}'], unknown keys [] "
            "(strict=False ignores both)"
        }
        for name in ("first.0.weight", "last.0.weight")
    ]


def test_cpu_gathers_everything_and_training_goes_on() -> None:
    for rank, seen in enumerate(run("everything_on_cpu")):
        assert seen == {"now": True, "went on": True, "again": True, "local": PARTS[rank]}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adadelta"])
def test_a_rank_without_parameters_steps_without_effect(optimizer: str) -> None:
    seen = run("empty_stage", optimizer=optimizer)
    assert [s["number"] for s in seen] == [8, 0]
    for one in seen:
        assert one["equal"]
        assert one["lr"] == 0.0025
        assert one["closure"] == 2.5


def test_extra_state_is_the_owners() -> None:
    # 3 steps of 2 microbatches; a container that is run on all ranks counts nothing of its own.
    for seen in run("extra_state"):
        assert seen == [6, 6]


def test_a_containers_own_buffer_is_in_every_part() -> None:
    for seen in run("buffer_of_a_container"):
        assert seen["losses"]
        assert seen["calls"] == [8, 8, 8, 8]


@pytest.mark.parametrize("kind", ["own", "torch's allreduce_hook"])
def test_a_communication_hook_replaces_the_reduction(kind: str) -> None:
    for seen in run("communication_hook", 4, kind=kind):
        assert seen["seen"] == ([("state", 0, 4, True)] if kind == "own" else [])
        assert "there can be one hook" in seen["again"]
        assert seen["close"] == [True] * 4


def test_a_groups_count_comes_from_a_rank_that_has_its_parameters() -> None:
    parameters = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}
    for group in run_distributed(f"{CASES}counts_of_groups", 2, parameters=parameters):
        assert group["step"] == 3
        assert group["params"] == [0, 1]
