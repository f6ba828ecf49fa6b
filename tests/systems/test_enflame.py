"""The Enflame dialect: its own example, its errors, and that both ways of splitting a product are right."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_lite.config import ConfigError
from smp_lite.systems import load_plan
from smp_lite.systems.plan.layouts import layout_of
from smp_lite.systems.plan.sharding_rules import chunk_range, holders

DATA = Path(__file__).parent / "data"
EXAMPLE: dict[str, Any] = json.loads((DATA / "enflame.json").read_text())
SMALL = {"mode": "hybrid", "sharding_size": 2, "sharding_dim": 0, "stage_cnt": 2, "accum_degree": 4}


def mapped(*rows: str) -> dict[str, dict[str, str]]:
    """A device map: one word a stage, one letter a shard."""
    return {
        f"stage_{stage}": {f"shard_{shard}": f"dtu:{ord(c) - ord('a')}" for shard, c in enumerate(row)}
        for stage, row in enumerate(rows)
    }


def test_the_example_of_the_document() -> None:
    plan = load_plan(DATA / "enflame.json")
    assert plan.topology.axes == (("pp", 8), ("tp", 4))
    for stage in range(8):
        for shard in range(4):
            assert plan.placement.labels[4 * stage + shard] == f"/device:XLA_DTU:{5 * stage + shard}"
            assert plan.placement.local_ordinals[4 * stage + shard] == 4 * stage + shard
    assert plan.schedule.name == "sequential"
    assert (plan.microbatches.count, plan.microbatches.source) == (1, "consume")
    assert (plan.tensor.mode, plan.tensor.sharding_dim, plan.tensor.fuse) == ("enflame", -1, True)
    assert plan.dp_size == 1 and plan.world_size == 32
    assert any("one works at a time" in note for note in plan.notes)
    # Column parallel in torch's terms: the weight's dim 0, and the bias with it.
    assert layout_of(plan.tensor, "linear", "weight", 2)[0] == (("tp",), ())
    assert layout_of(plan.tensor, "linear", "bias", 1)[0] == (("tp",),)


def test_a_hybrid_without_a_map() -> None:
    plan = load_plan(SMALL)
    assert (plan.pp_size, plan.tp_size, plan.world_size) == (2, 2, 4)
    assert (plan.schedule.name, plan.microbatches.count, plan.microbatches.source) == ("1f1b", 4, "consume")
    assert plan.bubble == Fraction(1, 5)
    assert layout_of(plan.tensor, "linear", "weight", 2)[0] == ((), ("tp",))
    assert layout_of(plan.tensor, "linear", "bias", 1)[0] == ((),)
    assert load_plan(SMALL, world_size=4).topology == plan.topology


def test_stages_on_the_same_devices_are_held_by_the_same_ranks() -> None:
    config = {**EXAMPLE, "device_mapping": mapped(*["abcd"] * 8)}
    plan = load_plan(config)
    assert (plan.world_size, plan.pp_size, plan.stages.num_stages) == (4, 1, 8)
    assert all(plan.stages_of_rank(rank) == tuple(range(8)) for rank in range(4))
    two = load_plan({**SMALL, "stage_cnt": 4, "device_mapping": mapped("ab", "ab", "cd", "cd")})
    assert (two.pp_size, two.stages.owners) == (2, (0, 0, 1, 1))
    assert two.stages_of_rank(3) == (2, 3)


def test_a_pipeline_uses_the_first_shard_of_each_stage() -> None:
    plan = load_plan({**EXAMPLE, "mode": "pipeline", "accum_degree": 4})
    assert plan.topology.axes == (("pp", 8), ("tp", 1))
    assert plan.placement.labels[1] == "/device:XLA_DTU:5"
    assert plan.tensor.mode is None and plan.schedule.name == "1f1b"
    assert any("only shard_0" in warning for warning in plan.warnings)


def test_sharding_with_accumulation_is_no_pipeline() -> None:
    plan = load_plan({**EXAMPLE, "accum_degree": 4})
    assert (plan.schedule.name, plan.microbatches.count) == ("sequential", 4)


def test_aliases_give_ranks_by_stages_or_by_shards() -> None:
    config = {**SMALL, "device_mapping": mapped("ab", "cd")}
    by_shard = load_plan({**config, "device_aliases": {"dtu:0": 0, "dtu:1": 2, "dtu:2": 1, "dtu:3": 3}})
    assert by_shard.topology.axes == (("tp", 2), ("pp", 2))
    assert by_shard.placement.labels == ("dtu:0", "dtu:2", "dtu:1", "dtu:3")
    by_stage = load_plan({**config, "device_aliases": {f"dtu:{n}": n for n in range(4)}})
    assert by_stage.topology.axes == (("pp", 2), ("tp", 2))
    with pytest.raises(ConfigError, match="count up from 0"):
        load_plan({**config, "device_aliases": {"dtu:0": 3, "dtu:1": 2, "dtu:2": 1, "dtu:3": 0}})
    with pytest.raises(ConfigError, match="no rank for 'dtu:1'"):
        load_plan({**config, "device_aliases": {"dtu:0": 0}})


def test_a_trailing_comma_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "pattern.json"
    path.write_text(json.dumps(SMALL, indent=1).replace("4\n", "4,\n"))
    plan = load_plan(path)
    assert plan.microbatches.count == 4
    assert any("comma" in warning for warning in plan.warnings)
    path.write_text('{"mode": "hybrid" "stage_cnt": 2}')
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_plan(path)
    path.write_text('{"stage_cnt": 2, "mode": ",}", "stage_cnt": 3}')
    with pytest.raises(ConfigError, match="'stage_cnt' stands twice"):
        load_plan(path)


def without(stage: int, shard: int) -> dict[str, Any]:
    config = copy.deepcopy(EXAMPLE)
    del config["device_mapping"][f"stage_{stage}"][f"shard_{shard}"]
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**EXAMPLE, "sharding_dim": 1}, r"sharding_dim must be 0 .*Got sharding_dim=1 \(int\)"),
        ({**EXAMPLE, "sharding_dim": True}, "sharding_dim must be 0"),
        ({**EXAMPLE, "sharding_dim": -1.0}, r"sharding_dim must be 0 .*Got sharding_dim=-1.0 \(float\)"),
        ({**SMALL, "stage_cnt": 3, "device_mapping": mapped("ab", "cd")}, "device_mapping has no stage_2"),
        ({**SMALL, "stage_cnt": 1, "device_mapping": mapped("ab", "cd")}, "has 'stage_1'.*begin at 0"),
        ({**EXAMPLE, "device_mapping": {**EXAMPLE["device_mapping"], "stage_8": {}}}, "has 'stage_8'"),
        (without(3, 2), "device_mapping.stage_3 has no shard_2"),
        ({**EXAMPLE, "sharding_size": 3}, "does not divide the 32 devices.*1, 2, 4, 8, 16, 32"),
        ({**EXAMPLE, "sharding_size": 2}, "has 'shard_2'"),
        ({**EXAMPLE, "shard_size": 2}, "unknown key 'shard_size': did you mean 'sharding_size'"),
        ({**EXAMPLE, "mode": "Pipeline"}, "mode must be one of.*did you mean 'pipeline'"),
        ({**EXAMPLE, "stage_cnt": 0}, "stage_cnt must be a whole number of 1 or more"),
        ({**EXAMPLE, "stage_cnt": "8"}, "stage_cnt must be a whole number"),
        ({**EXAMPLE, "accum_degree": True}, "accum_degree must be a whole number"),
        ({**EXAMPLE, "accum_degree": 0}, "accum_degree must be a whole number"),
        ({"mode": "hybrid", "sharding_size": 2}, "stage_cnt is missing"),
        ({**SMALL, "device_mapping": mapped("aa", "bc")}, "names one device for two shards"),
        ({**SMALL, "device_mapping": mapped("ab", "bc")}, "3 devices"),
        ({**SMALL, "device_mapping": mapped("ab", "ba")}, "stage_0 and stage_1 share"),
        ({**SMALL, "fuse": 1}, "fuse must be true or false"),
        (
            {**SMALL, "device_mapping": {"stage_0": {"shard_0": 1, "shard_1": 2}, "stage_1": {}}},
            "must be a str",
        ),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(config)


def test_the_ranks_are_those_of_the_map() -> None:
    with pytest.raises(
        ConfigError, match=r"16 ranks for 32 devices: device_mapping names 32.*need not be said"
    ):
        load_plan(DATA / "enflame.json", world_size=16)


@pytest.mark.parametrize("dim", [-1, 0])
def test_both_dimensions_give_the_dense_product(dim: int) -> None:
    """x [2, 4] times a kernel [4, 6] that two ranks share: by outputs and gathered, by inputs and summed."""
    random = np.random.default_rng(0)
    x, kernel, dy = (random.standard_normal(shape) for shape in ((2, 4), (4, 6), (2, 6)))
    weight = kernel.T
    plan = load_plan({**SMALL, "sharding_dim": dim, "stage_cnt": 1})
    dims, _ = layout_of(plan.tensor, "linear", "weight", 2)
    results, gradients = [], np.zeros_like(weight)
    for chunk, ranks in sorted(holders(plan, dims).items()):
        assert len(ranks) == 1
        rows, columns = (
            slice(*chunk_range(size, 2 if axes else 1, index))
            for size, axes, index in zip(weight.shape, dims, chunk)
        )
        results.append(x[:, columns] @ weight[rows, columns].T)
        gradients[rows, columns] += dy[:, rows].T @ x[:, columns]
    merged = np.concatenate(results, axis=1) if dim == -1 else sum(results)
    np.testing.assert_allclose(merged, x @ kernel, rtol=1e-14)
    np.testing.assert_allclose(gradients.T, x.T @ dy, rtol=1e-14)
