"""Ranks, groups and messages of the public API on real MPI processes."""

from __future__ import annotations

import pytest
import torch

from tests.api_support import same
from tests.harness import run_distributed

pytestmark = pytest.mark.sampled(3)

CASES = "tests.launch.api.api_cases:"

# (world size, partitions, strategy) -> (mp groups, dp groups), worked out by hand.
LAYOUTS = {
    (4, 2, "cluster"): ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    (4, 2, "spread"): ([[0, 2], [1, 3]], [[0, 1], [2, 3]]),
    (4, 4, "cluster"): ([[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    (4, 1, "cluster"): ([[0], [1], [2], [3]], [[0, 1, 2, 3]]),
    (6, 3, "cluster"): ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    (6, 3, "spread"): ([[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]),
    (6, 2, "PDT"): ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
}


def parameters(partitions: int, strategy: str = "cluster", **more: object) -> dict[str, object]:
    return {"partitions": partitions, "placement_strategy": strategy, "ddp": True, **more}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("world_size", "partitions", "strategy"), LAYOUTS)
def test_every_getter(world_size: int, partitions: int, strategy: str) -> None:
    mp_groups, dp_groups = LAYOUTS[world_size, partitions, strategy]
    found = run_distributed(f"{CASES}getters", world_size, parameters=parameters(partitions, strategy))
    for rank, seen in enumerate(found):
        (mp,) = [group for group in mp_groups if rank in group]
        (dp,) = [group for group in dp_groups if rank in group]
        assert seen["initialized"] == (False, True)
        assert seen["tracing"] is False
        assert seen["rank"] == seen["local"] == (rank, world_size)
        assert seen["mp_group"] == seen["pp_group"] == mp
        assert seen["dp_group"] == seen["rdp_group"] == dp
        assert seen["tp_group"] == [rank]
        assert seen["mp"] == seen["pp"] == (mp.index(rank), len(mp))
        assert seen["dp"] == seen["rdp"] == (dp.index(rank), len(dp))
        assert seen["tp"] == (0, 1)


@pytest.mark.parametrize(
    ("world_size", "partitions", "strategy"),
    [(4, 2, "spread"), pytest.param(6, 3, "cluster", marks=pytest.mark.thorough)],
)
def test_process_groups_and_collectives_reach_their_group_and_no_other(
    world_size: int, partitions: int, strategy: str
) -> None:
    mp_groups, dp_groups = LAYOUTS[world_size, partitions, strategy]
    found = run_distributed(f"{CASES}groups_at_work", world_size, parameters=parameters(partitions, strategy))
    for rank, seen in enumerate(found):
        (mp,) = [group for group in mp_groups if rank in group]
        (dp,) = [group for group in dp_groups if rank in group]
        wanted = {"world": list(range(world_size)), "mp": mp, "dp": dp}
        wanted |= {"pp": mp, "rdp": dp, "tp": [rank]}
        assert seen == {kind: (group, group) for kind, group in wanted.items()}


def test_ranks_that_give_other_parameters_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMP_LITE_PARAMETERS", raising=False)
    for text in run_distributed(f"{CASES}differing_parameters", 2):
        assert text.startswith("pipeline is 'simple' on rank 1 and 'zero_bubble' on rank 0")


def test_ranks_that_would_talk_by_other_wires_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMP_LITE_PARAMETERS", raising=False)
    for text in run_distributed(f"{CASES}differing_wires", 2):
        assert text.startswith("SMP_LITE_WIRE is c10d on rank 1 and not set on rank 0: it has to be the same")


def test_process_groups_need_ddp() -> None:
    (text, _) = run_distributed(f"{CASES}process_groups_without_ddp", 2, parameters={"partitions": 2})
    assert text == (
        "SMPError: smp.get_dp_process_group() needs torch.distributed: set ddp: True in the parameters"
    )


def test_allgather() -> None:
    found = run_distributed(f"{CASES}gathered", 4, parameters=parameters(2))
    for rank, (ranks, dicts, nones, tensors, mixed) in enumerate(found):
        assert ranks == [0, 1, 2, 3]
        first = rank // 2 * 2
        assert dicts == [{"rank": first}, {"rank": first + 1}]
        assert nones == [None] * 4
        assert same(tensors, [torch.full((2,), float(rank % 2 + i)) for i in (0, 2)])
        wanted = [[torch.tensor(i, dtype=torch.bfloat16), "x" * 100_000] for i in range(4)]
        assert same(mixed, wanted)


def test_send_recv_and_broadcast() -> None:
    parcels = [None, 3, {"a": [torch.arange(3), None]}, torch.ones(300_000), "text", ()]
    found = run_distributed(f"{CASES}messages", 4, parameters=parameters(2))
    for rank, received in enumerate(found):
        partner = rank ^ 1
        wanted = [(partner, parcel) for parcel in parcels]
        wanted += ["ring123" if rank == 0 else "ring" + "".join(map(str, range(1, rank)))]
        wanted += [{"from": 2}]
        if rank < 2:  # dp rank 0 hears from dp rank 1, two ranks on
            wanted += [torch.tensor([rank + 2])]
        assert same(received, wanted)


def test_messages_keep_their_order_beside_collectives() -> None:
    found = run_distributed(f"{CASES}overtaking", 2, parameters={"partitions": 2})
    assert found == [[], ["first", "second"]]


def test_wrong_arguments_name_themselves() -> None:
    seen, _ = run_distributed(f"{CASES}mistakes", 2, parameters={"partitions": 2})
    assert seen["no such rank"] == ("ValueError: WORLD_RANK 7 does not exist: the group has 2 members")
    assert "MP_RANK 2 does not exist" in seen["no such mp rank"]
    assert "DP_RANK -1 does not exist" in seen["negative"]
    assert seen["itself"] == "SMPError: rank 0 cannot send to itself"
    assert seen["group"].startswith("TypeError: group must be one of smp.WORLD")
    assert seen["rank type"].startswith("TypeError: rank_type must be an smp.RankType")
    assert seen["again"] == ""  # what the launcher gives wins


@pytest.mark.ci
def test_one_process_is_a_world_too() -> None:
    (seen,) = run_distributed(f"{CASES}one_process", 1, parameters={"partitions": 1})
    assert seen["sizes"] == [1, 1, 1]
    assert seen["gathered"] == ["x"]
    assert "cannot send to itself" in seen["send"]
