"""Configurations of the other systems train an ordinary model; results equal the dense model's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_distributed
from tests.launch.launching import launch
from tests.tensor.test_runtime import dense

pytestmark = pytest.mark.sampled(3)


def mapping(stages: int, shards: int) -> dict[str, Any]:
    return {
        f"stage_{stage}": {
            f"shard_{shard}": f"/device:XLA_DTU:{5 * stage + shard}" for shard in range(shards)
        }
        for stage in range(stages)
    }


def enflame(
    mode: str, stages: int, shards: int, dim: int = -1, accum: int = 1, **more: Any
) -> dict[str, Any]:
    return {
        "mode": mode,
        "sharding_size": shards,
        "sharding_dim": dim,
        "stage_cnt": stages,
        "accum_degree": accum,
        "device_mapping": mapping(stages, shards),
        **more,
    }


def libai(**dist: Any) -> dict[str, Any]:
    return {"train": {"dist": dist}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "enflame hybrid, inputs": (4, enflame("hybrid", 2, 2, 0, 4)),
    "enflame hybrid, inputs, one by one": (4, enflame("hybrid", 2, 2, 0, 4, fuse=False)),
    "enflame pipeline": (2, enflame("pipeline", 2, 1, accum=2)),
    "enflame sharding, one stage": (2, enflame("sharding", 1, 2, 0)),
    "colossal pipeline, tensor": (4, {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}),
    "colossal data, pipeline, tensor": (
        8,
        {"parallel": {"pipeline": {"size": 2}, "tensor": {"size": 2, "mode": "1d"}}},
    ),
    "colossal data alone": (2, {"parallel": {}}),
    "libai tensor, pipeline": (
        4,
        libai(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_num_layers=4),
    ),
    "libai data, tensor": (4, libai(data_parallel_size=2, tensor_parallel_size=2)),
    "torchprime data, tensor": (
        4,
        {
            "ici_mesh": {"data": 2, "tensor": 2},
            "sharding": {
                "blocks.*.up.weight": ["tensor", None],
                "blocks.*.down.weight": [None, "tensor"],
                "embed.weight": ["tensor", None],
                "out.weight": ["tensor", None],
                "blocks.*": ["data", None],
            },
        },
    ),
    "libai data in pieces, pipeline": (
        4,
        {
            "train": {
                "dist": {"pipeline_parallel_size": 2, "pipeline_num_layers": 4},
                "zero_optimization": {"enabled": True, "stage": 1},
            }
        },
    ),
    "colossal data in pieces, tensor": (
        4,
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "zero": {"level": 3}},
    ),
    "libai by hand": (
        2,
        libai(pipeline_parallel_size=2, pipeline_num_layers=4, custom_pipeline_stage_id=[0, 1, 1, 1]),
    ),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_dense_model(name: str) -> None:
    world_size, config = CASES[name]
    found = run_distributed("tests.tensor.plan_cases:train", world_size, kwargs={"config": config})
    num_replicas = len({rank["replica"] for rank in found})
    expected = dense(num_replicas)
    held = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=1e-6)
        for parameter, value in rank["parameters"].items():
            held.add(parameter)
            assert (value - expected["parameters"][parameter]).abs().max() < 1e-5, parameter
    assert held == set(expected["parameters"])
    uses_tensor = name not in ("enflame pipeline", "colossal data alone", "libai by hand")
    assert bool(found[0]["split"]) == uses_tensor
    if name == "libai by hand":
        first = {p for rank in found if rank["coordinate"][0] == 0 for p in rank["parameters"]}
        assert first == {
            "embed.weight",
            *(p for p in expected["parameters"] if p.startswith("blocks.0.")),
        }


def test_a_file_is_recognised_and_changed_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "patterns.json"
    path.write_text(json.dumps(enflame("hybrid", 2, 1)).replace("}}}", "},}}"))  # a comma that JSON forbids
    found = run_distributed(
        "tests.tensor.plan_cases:train",
        2,
        kwargs={"config": str(path), "overrides": ("accum_degree=2",)},
    )
    assert found[0]["losses"] == pytest.approx(dense()["losses"][0], rel=1e-6)


@pytest.mark.parametrize(
    ("world_size", "config", "text"),
    [
        (
            2,
            enflame("sharding", 1, 2, -1, fuse=False),
            r"out has 5 output features, which 2 shards cannot share equally.*: 4 or 6",
        ),
        (
            4,
            {"parallel": {"tensor": {"size": 4, "mode": "2d"}}},
            r"parallel\.tensor\.mode.*smp_lite\.nn\.two_d",
        ),
        (
            2,
            libai(pipeline_parallel_size=2, pipeline_num_layers=5),
            r"is for 5 layers, and no lists of the model have so many",
        ),
        (2, {"ici_mesh": {"expert": 2}, "sharding": {}}, r"ici_mesh\.expert.*'expert' is not supported yet"),
        (
            2,
            {"ici_mesh": {"tensor": 2}, "sharding": {"blocks.*.up.bias": ["tensor"]}},
            r"sharding 'blocks\.\*\.up\.bias': blocks\.0\.up\.bias is split .*give blocks\.0\.up\.weight",
        ),
        (2, {"parallel": {}, "clip_grad_norm": 1.0}, r"clip_grad_norm=1\.0 is what the engine"),
        (3, {"parallel": {"pipeline": 2}}, r"3 ranks are not a multiple of pipeline 2 x tensor 1"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_users_key(
    world_size: int, config: dict[str, Any], text: str
) -> None:
    for told in run_distributed("tests.tensor.plan_cases:told", world_size, kwargs={"config": config}):
        assert re.search(text, told)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            libai(tensor_parallel_size=8) | {"compat": "libai"},
            r"compat=libai: tensor size 8 -> 2, pipeline size 1 -> 1",
        ),
        (
            {"ici_mesh": {"data": 2}, "sharding": {"out.weight": [["data", "fsdp"], None]}},
            r"sharding out\.weight: over the axis 'data' every rank has a copy of its own",
        ),
        (
            enflame("pipeline", 2, 2),
            r"mode 'pipeline' shares out no layer: of each stage only shard_0 is used \(sharding_size 2\)",
        ),
    ],
)
def test_what_is_done_in_another_way_is_a_warning_of_the_job(config: dict[str, Any], text: str) -> None:
    first, second = run_distributed("tests.tensor.plan_cases:warned", 2, kwargs={"config": config})
    assert re.search(text, first)
    assert not re.search(text, second)


@pytest.mark.parametrize("dim", [0, -1])
def test_enflame_leaves_the_projection_of_torchs_attention_whole(dim: int) -> None:
    config = enflame("sharding", 1, 2, dim)
    for rank in run_distributed("tests.tensor.plan_cases:attention", 2, kwargs={"config": config}):
        kinds = ["bias", "weight"] if dim else ["weight"]
        assert rank["split"] == [f"{name}.{kind}" for name in ("first", "last") for kind in kinds]
        assert rank["difference"] < 1e-5
        assert not rank["log"]


def test_several_batches_of_the_loader_make_one_step() -> None:
    config = enflame("pipeline", 2, 1, accum=4)
    kwargs = {"config": config, "num_steps": 3}
    for losses, told in run_distributed("tests.tensor.plan_cases:consume", 2, kwargs=kwargs):
        assert losses == pytest.approx(dense()["losses"][0], rel=1e-6)
        assert len(told) == 4
        assert "has 3 batches, and accum_degree takes 4 for each step" in told[0]
        assert "ended with 3 batch(es) left over" in told[1]
        assert "they are not alike: tensors of shapes [[1" in told[2]
        assert "nested differently" in told[3]


@pytest.mark.slow
def test_run_with_a_configuration_and_changes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "import smp_lite as smp\n"
        "smp.init()\n"
        "print(smp.pp_size(), smp.tp_size(), smp.rdp_size(), sys.argv[1:])\n"
    )
    (tmp_path / "colossal.py").write_text("parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n")
    run = ("--processes", "4", "--config", "colossal.py")
    result = launch(tmp_path, *run, str(script), "a=b")
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] 2 2 1 ['a=b']" for rank in range(4)]
    result = launch(tmp_path, *run, "parallel.pipeline=1", str(script))
    assert "[3] 1 2 2 []" in result.stdout
    for words, told in [
        ((*run, "parallel.pipeline=3", str(script)), "4 ranks are not a multiple of pipeline 3 x tensor 2"),
        (("--processes", "4", "x=1", str(script)), "x=1 changes a configuration, but there is none"),
        ((*run, "parallel.pipeline=1"), "no script after parallel.pipeline=1"),
        ((*run, "--parameters", "{}", str(script)), "--config and --parameters are two configurations"),
    ]:
        failed = launch(tmp_path, *words)
        assert (failed.returncode, told in failed.stderr) == (2, True), failed.stderr


SAME_MESH: dict[str, tuple[int, dict[str, Any]]] = {
    "sagemaker": (4, {"partitions": 2, "tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}),
    "colossal": (4, {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}),
    "libai": (4, libai(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_num_layers=4)),
    "enflame": (4, enflame("hybrid", 2, 2)),
    # It has no pipelines; two ranks hold what elsewhere two stages do.
    "torchprime": (
        2,
        {
            "ici_mesh": {"tensor": 2},
            "sharding": {
                "blocks.*.up.weight": ["tensor", None],
                "blocks.*.down.weight": [None, "tensor"],
            },
        },
    ),
}


@pytest.mark.slow
def test_one_mesh_said_in_five_dialects_gives_the_same_losses_to_the_bit() -> None:
    found = {}
    for dialect, (world_size, config) in SAME_MESH.items():
        kwargs = {"config": config, "is_sagemaker": dialect == "sagemaker"}
        ranks = run_distributed("tests.tensor.plan_cases:losses_to_the_bit", world_size, kwargs=kwargs)
        assert all(losses == ranks[0] for losses in ranks), dialect
        found[dialect] = ranks[0]
    assert len(set(found["sagemaker"])) == 4  # it trains
    assert all(losses == found["sagemaker"] for losses in found.values()), found
