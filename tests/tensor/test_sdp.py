"""SMP's sharded data parallelism: the numbers of plain torch, a share of the memory, and every key."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from smp_lite.config import Config, ConfigError
from smp_lite.plan.topology import Topology
from tests.harness import run_distributed
from tests.tensor import sdp_cases
from tests.tensor.runtime_cases import batches
from tests.tensor.sdp_cases import config

CASES = "tests.tensor.sdp_cases"


def train(
    ranks: int, degree: int, *, keys: dict[str, Any] | None = None, **kwargs: Any
) -> list[dict[str, Any]]:
    return run_distributed(
        f"{CASES}:train", ranks, kwargs={"parameters": config(degree, **(keys or {})), **kwargs}
    )


def both(ranks: int, degree: int, *, keys: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """What ranks find with pieces, and with whole parameters."""
    return train(ranks, degree, keys=keys, **kwargs), train(ranks, 1, keys=keys, **kwargs)


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, exactly: bool = True) -> None:
    close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == (theirs["losses"] if exactly else pytest.approx(theirs["losses"], rel=1e-4))
        assert list(mine["state"]) == list(theirs["state"])
        torch.testing.assert_close(mine["state"], theirs["state"], **close)
        torch.testing.assert_close(mine["optimizer"]["state"], theirs["optimizer"]["state"], **close)


VARIANTS: dict[str, dict[str, Any]] = {
    "net": {},
    "one unit": {"model": "one unit"},
    "tied": {"model": "tied"},
    "groups": {"groups": "two", "optimizer": "SGD"},
    "unused": {"model": "unused"},
    "buffers": {"model": "counting"},
    "frozen, and a scalar": {"model": "shared"},
    "called again": {"model": "twice"},
    "frozen later": {"freeze_at": 1},
    "bf16 parameters": {"half": True},
    "sums over microbatches": {
        "keys": {"microbatches": 2},
        "options": {"average_grads_across_microbatches": False},
    },
    "static_mode": {"keys": {"static_mode": True, "microbatches": 2}},
    "little is live": {"keys": {"sdp_max_live_parameters": 1}},
    "small reductions": {"keys": {"sdp_reduce_bucket_size": 10}},
    "some stay whole": {"keys": {"sdp_param_persistence_threshold": 40}},
    "all stay whole": {"keys": {"sdp_param_persistence_threshold": 1e6}},
    "scheduler": {"scheduler": True},
    "closure": {"closure": True},
    "checkpointing": {"checkpointing": True},
    "horovod": {"keys": {"ddp": False, "horovod": True}},
    "bf16": {"keys": {"bf16": True}},
    "fp16": {"keys": {"fp16": True, "sdp_param_persistence_threshold": 40}},
}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_train_as_with_whole_parameters_to_the_bit(name: str) -> None:
    found, expected = both(2, 2, **VARIANTS[name])
    check_same(found, expected)
    assert [rank["rate"] for rank in found] == [rank["rate"] for rank in expected]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("degree", "keys"),
    [
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2, "placement_strategy": "spread"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2, "placement_strategy": "PDT"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "virtual_stages": 2}),
    ],
    ids=["cluster", "spread", "PDT", "virtual stages"],
)
def test_pipelines_train_as_with_whole_parameters_to_the_bit(degree: int, keys: dict[str, Any]) -> None:
    check_same(*both(4, degree, keys=keys, model="tied"))


@pytest.mark.ci
def test_split_layers_train_as_with_whole_parameters_to_the_bit() -> None:
    keys = {"tensor_parallel_degree": 2, "prescaled_batch": True, "sdp_param_persistence_threshold": 20}
    check_same(*both(4, 2, keys=keys))


@pytest.mark.ci
@pytest.mark.sampled(2)
@pytest.mark.parametrize("degree", [2, 4])
def test_four_ranks_train_as_with_whole_parameters_but_for_rounding(degree: int) -> None:
    check_same(*both(4, degree), exactly=False)


def test_one_process_and_plain_torch_find_the_same() -> None:
    expected = sdp_cases.plain(2)
    for rank in train(2, 2):
        torch.testing.assert_close(rank["state"], expected["state"], rtol=1e-5, atol=1e-6)


# Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 4), (4, 2)])
def test_a_rank_keeps_one_piece_of_parameters_gradients_and_state(ranks: int, degree: int) -> None:
    state = sdp_cases.plain(1, num_steps=1)["state"]
    share = sum(-(-p.numel() // degree) for p in state.values())
    for rank in train(ranks, degree):
        assert rank["wholes"] == 0
        assert rank["elements"] == rank["gradients"] == share
        assert rank["memory"] == 4 * share  # and no more is held behind the pieces
        assert rank["of_state"] == 2 * share


def test_parameters_below_the_threshold_stay_whole() -> None:
    state = sdp_cases.plain(1, num_steps=1)["state"]
    share = sum(p.numel() if p.numel() < 64 else -(-p.numel() // 2) for p in state.values())
    for rank in train(2, 2, keys={"sdp_param_persistence_threshold": 64}):
        assert rank["elements"] == rank["gradients"] == share
        assert rank["wholes"] == sum(p.numel() < 64 for p in state.values())


@pytest.mark.ci
def test_live_parameters_and_reductions_have_limits() -> None:
    (free, *_) = train(2, 2)
    largest = max(free["groups"])
    assert free["most_live"] > largest and free["largest"] > 100
    (capped, *_) = train(2, 2, keys={"sdp_max_live_parameters": largest, "sdp_reduce_bucket_size": 100})
    assert capped["most_live"] == largest and capped["largest"] <= 100
    # What alone is more than the limit is gathered all the same, one block at a time.
    (tight, *_) = train(2, 2, keys={"sdp_max_live_parameters": 1})
    assert tight["most_live"] == largest


# Clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"closure": True}], ids=["step", "closure"])
def test_every_step_clips_the_whole_models_gradient(options: dict[str, Any]) -> None:
    expected = sdp_cases.plain(2, clip=0.3)
    for rank in train(2, 2, keys={"sdp_gradient_clipping": 0.3}, **options):
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        torch.testing.assert_close(rank["state"], expected["state"], rtol=1e-5, atol=1e-6)
    assert min(expected["norms"]) > 0.3


def test_clipping_is_by_the_norm_over_all_stages() -> None:
    expected = sdp_cases.plain(2, clip=0.3, microbatches=2)
    keys = {"sdp_gradient_clipping": 0.3, "pipeline_parallel_degree": 2, "microbatches": 2}
    for rank in train(4, 2, keys=keys):
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        torch.testing.assert_close(rank["state"], expected["state"], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}], ids=["each", "every other"])
def test_gradients_of_several_passes_add_up(options: dict[str, Any]) -> None:
    check_same(*both(2, 2, passes=2, options=options), exactly=False)


# Names ------------------------------------------------------------------------------------------------------


def test_slices_are_there_before_the_first_step() -> None:
    parameters = config(2, sdp_param_persistence_threshold=20)
    found = run_distributed(f"{CASES}:before_a_step", 2, kwargs={"parameters": parameters, "what": "slices"})
    first, second = (of_groups for of_groups, _ in found)
    assert found[0][1] is None  # no step, no norm
    assert first[0]["embed.weight"][:3] == ((8, 8), 64, 32)
    assert first[1]["out.bias"][:3] == ((5,), 5, 3)
    assert second[1]["out.bias"][3][-1] == 0.0 and second[1]["out.bias"][3].shape == (3,)


def test_over_several_partitions_slices_are_there_after_the_first_step() -> None:
    parameters = config(2, pipeline_parallel_degree=2)
    for told in run_distributed(
        f"{CASES}:before_a_step", 4, kwargs={"parameters": parameters, "what": "told"}
    ):
        for name in ("ds_tensor", "fp16_groups", "flat"):
            assert "first step" in told[name], told[name]
        assert told["norm"] is None
        assert told["shape"] == ((8, 8), 64, 32)
    slices = [rank["slices"] for rank in train(4, 2, keys={"pipeline_parallel_degree": 2}, num_steps=1)]
    assert {name for of_groups in slices for of_group in of_groups for name in of_group} == set(
        sdp_cases.plain(1, num_steps=1)["state"]
    )


@pytest.mark.slow
def test_names_are_missing_without_shards() -> None:
    (told,) = run_distributed(f"{CASES}:before_a_step", 1, kwargs={"parameters": config(1), "what": "told"})
    assert "sharded_data_parallel_degree above 1" in told["norm"]


# Who is with whom -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["cluster", "spread", "DTP", "PDT", "PTD", "TDP"])
@pytest.mark.parametrize(
    ("pp", "tp", "dp", "degree"), [(2, 1, 4, 2), (1, 2, 4, 4), (2, 2, 2, 2), (2, 2, 6, 3)]
)
def test_pieces_lie_over_consecutive_dp_ranks(strategy: str, pp: int, tp: int, dp: int, degree: int) -> None:
    world = pp * tp * dp
    without = Topology.from_placement(world, pp, tp, strategy)
    sharded = Topology.from_placement(world, pp, tp, strategy, sharded=degree)
    for rank in range(world):
        for kind in ("MP", "DP", "PP", "TP", "RDP", "WORLD"):
            assert sharded.group(kind, rank) == without.group(kind, rank)
        replicas = without.group("RDP", rank)
        start = replicas.index(rank) // degree * degree
        assert sharded.group("SDP", rank) == replicas[start : start + degree]


def test_ranks_and_process_groups() -> None:
    parameters = config(2, placement_strategy="spread", pipeline_parallel_degree=1)
    found = run_distributed(f"{CASES}:ranks_of_groups", 4, kwargs={"parameters": parameters})
    for rank, told in enumerate(found):
        assert told["dp"] == told["rdp"] == (rank, 4, [0, 1, 2, 3])
        assert told["shares"] == told["process group"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert told["copies"] == [rank % 2, rank % 2 + 2]


def test_degrees_that_do_not_divide_are_named() -> None:
    parsed = Config.from_parameters(config(3))
    with pytest.raises(ConfigError, match=r"degree=3 must divide dp_size, which is 4 .*one of 1, 2, 4"):
        parsed.check_world_size(4)
    parsed.check_world_size(6)
    with pytest.raises(ConfigError, match="cannot be used together"):
        Config.from_parameters({**config(2), "shard_optimizer_state": True})
    for off in (0, 1):
        Config.from_parameters(config(off)).check_world_size(3)


REFUSED = {
    "unfrozen": r"'blocks.1.up.weight' was frozen when reductions were set up",
    "inner step": r"inner optimizer's step\(\) was called, which does not clip",
    "live state": "of a tensor that shared memory with the parameter 'blocks",
    "shared memory": "'blocks.0.up.weight' and 'blocks.1.up.weight' share memory without being one",
    "smp.save": "one file for an mp rank would hold those of one: call it on all ranks with v3=True",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_pieces_cannot_do_is_refused(what: str) -> None:
    kwargs = {"parameters": config(2, sdp_gradient_clipping=1.0), "what": what, "folder": "/nowhere/file"}
    for text in run_distributed(f"{CASES}:refused", 2, kwargs=kwargs):
        assert re.search(REFUSED[what], text), text


# Whole again, for a while -----------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("partitions", [1, 2])
def test_gathered_shows_the_whole_model_and_keeps_what_all_ranks_change(partitions: int) -> None:
    keys = {"pipeline_parallel_degree": partitions, "sdp_param_persistence_threshold": 20}
    found = run_distributed(f"{CASES}:gathers", 2 * partitions, kwargs={"parameters": config(2, **keys)})
    for number, rank in enumerate(found):
        assert rank["types"] == {"Parameter"}
        for key, value in rank["before"].items():
            is_parameter = "running" not in key and key not in ("table", "norm.num_batches_tracked")
            assert torch.equal(rank["inside"][key], value), key
            assert torch.equal(rank["after"][key], value * 2 if is_parameter else value), key
        plain = sdp_cases.Counting()
        plain.load_state_dict(rank["inside"])
        x, _ = batches(1, number // partitions)[0]
        torch.testing.assert_close(rank["output"], plain.eval()(x).detach())
        # A change on one rank alone would be lost, or make the pieces those of two models.
        assert ("embed.weight changed within smp.gathered(rank=0)" in rank["told"]) == (number == 0)
        assert rank["memory"] < 4 * sum(value.numel() for value in rank["before"].values())
    expected = train(
        2 * partitions, 1, keys={"pipeline_parallel_degree": partitions}, model="counting", num_steps=1
    )
    assert list(expected[0]["state"]) == list(found[0]["before"])
