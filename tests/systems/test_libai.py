"""The LiBai dialect: its examples, batch arithmetic, stage tables, Python files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import ConfigError
from smp_lite.systems import load_plan
from smp_lite.systems.dialects.libai_batches import batch_sizes

DATA = Path(__file__).parent / "data"


def dist(**keys: Any) -> dict[str, Any]:
    return {"train": {"dist": keys}}


def file(tmp_path: Path, text: str, name: str = "config.py") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def groups(plan: Any, kind: str) -> list[list[int]]:
    return [list(group) for group in plan.topology.groups(kind)]


def test_eight_devices_by_default_are_data_parallel() -> None:
    plan = load_plan(dist(data_parallel_size=8), world_size=8)
    assert (plan.dp_size, plan.pp_size, plan.tp_size) == (8, 1, 1)
    assert load_plan(dist(tensor_parallel_size=8), world_size=8).tp_size == 8


def test_data_and_tensor() -> None:
    plan = load_plan(dist(data_parallel_size=2, tensor_parallel_size=4))
    assert groups(plan, "TP") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_data_and_pipeline() -> None:
    plan = load_plan(dist(data_parallel_size=2, pipeline_parallel_size=4, pipeline_num_layers=8))
    assert groups(plan, "RDP") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [plan.stages_of_rank(rank) for rank in range(8)] == [(rank // 2,) for rank in range(8)]


def test_tensor_and_pipeline() -> None:
    config = dist(tensor_parallel_size=2, pipeline_parallel_size=4, pipeline_num_layers=8)
    assert groups(load_plan(config, world_size=8), "TP") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_whole_pipeline_is_one_device_a_stage() -> None:
    plan = load_plan(dist(pipeline_parallel_size=8, pipeline_num_layers=24), world_size=8)
    assert (plan.dp_size, plan.pp_size, plan.tp_size) == (1, 8, 1)
    assert [plan.stages_of_rank(rank) for rank in range(8)] == [(rank,) for rank in range(8)]
    assert groups(plan, "PP") == [list(range(8))]


@pytest.mark.parametrize(
    ("custom", "counts"), [(None, [2, 2, 3, 1]), ([0, 1, 2, 3, 3, 3, 3, 3], [1, 1, 1, 5])]
)
def test_neighbours_hold_one_stage_of_eight_layers(custom: list[int] | None, counts: list[int]) -> None:
    """Two replicas of four stages: pairs of ranks have the same layers, stage by stage."""
    config = dist(pipeline_parallel_size=4, pipeline_num_layers=8, custom_pipeline_stage_id=custom)
    plan = load_plan(config, world_size=8)
    stages = plan.stage_of_layer(8)
    held = [sum(stages.count(stage) for stage in plan.stages_of_rank(rank)) for rank in range(8)]
    assert held == [count for count in counts for _ in range(2)]


def test_tensor_groups_are_the_stages_where_there_is_one_replica() -> None:
    config = dist(tensor_parallel_size=2, pipeline_parallel_size=4, pipeline_num_layers=8)
    plan = load_plan(config, world_size=8)
    assert [plan.stages_of_rank(rank) for rank in range(8)] == [(rank // 2,) for rank in range(8)]
    assert groups(plan, "PP") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups(plan, "RDP") == [[rank] for rank in range(8)]


def test_microbatches_of_a_pipeline_are_the_accumulation_steps() -> None:
    config = dist(pipeline_parallel_size=2, pipeline_num_layers=4)
    plan = load_plan(config, world_size=4)
    assert (plan.microbatches.size, plan.microbatches.count, plan.microbatches.global_batch_size) == (
        32,
        1,
        64,
    )
    plan = load_plan(config, world_size=4, overrides=["train.global_batch_size=256"])
    assert (plan.microbatches.count, plan.microbatches.source, plan.schedule.name) == (4, "consume", "1f1b")
    assert load_plan(dist(), world_size=1).stages.num_layers is None


def test_a_table_of_stages_from_the_command_line() -> None:
    config = dist(pipeline_parallel_size=2, pipeline_num_layers=4)
    change = "train.dist.custom_pipeline_stage_id=[0,0,0,1]"
    plan = load_plan(config, world_size=2, overrides=[change])
    assert plan.stage_of_layer(4) == (0, 0, 0, 1)
    assert plan.said("stages").file == "command line"
    for change, told in [
        ("~train.dist.pipeline_num_layers", "cannot be deleted"),
        ("model.layers=3", "keys begin with train."),
        ("train.dist.pipeline_parallel=2", "did you mean 'pipeline_parallel_size'"),
        ("train.dist.x.y=2", "unknown key 'train.dist.x.y'"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_plan(config, world_size=2, overrides=[change])


def test_all_three() -> None:
    config = dist(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_num_layers=8)
    plan = load_plan(config, world_size=8)
    assert plan.dp_size == 2
    assert [r for r in range(8) if plan.role_rank("pp", r) == 0] == [0, 1, 2, 3]
    assert groups(plan, "TP") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(plan, "RDP") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    said = plan.said("axis.dp")
    assert said.is_inferred and said.how == "8 ranks / (tensor 2 x pipeline 2)"


def test_a_stage_table_from_a_python_file() -> None:
    plan = load_plan(DATA / "libai.py", world_size=8)
    stages = plan.stage_of_layer(24)
    assert [stages.count(stage) for stage in range(4)] == [6, 7, 7, 4]
    assert (plan.microbatches.count, plan.microbatches.size, plan.microbatches.source) == (8, 8, "consume")
    said = plan.said("stages")
    assert said.key == "train.dist.custom_pipeline_stage_id" and str(said.file).endswith("libai.py:5")
    assert plan.said("axis.tp").is_default


def test_the_documents_table_of_four_layers() -> None:
    config = dist(pipeline_parallel_size=2, pipeline_num_layers=4, custom_pipeline_stage_id=[0, 0, 0, 1])
    assert load_plan(config, world_size=2).stage_of_layer(4) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((32, None, None), (32, 64, 1)),
        ((32, None, 4), (32, 256, 4)),
        ((None, 64, None), (32, 64, 1)),
        ((None, 64, 4), (8, 64, 4)),
        ((8, 64, None), (8, 64, 4)),
        ((8, 64, 4), (8, 64, 4)),
    ],
)
def test_batch_sizes(given: tuple[int | None, int | None, int | None], sizes: tuple[int, int, int]) -> None:
    assert batch_sizes(*given, 2) == sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None, None), "both None"),
        ((None, 63, None), "global_batch_size=63 is not a multiple of data-parallel size 2"),
        ((8, 60, None), "global_batch_size=60 is not a multiple of train_micro_batch_size 8.*multiple of 16"),
        ((8, 64, 3), "global_batch_size=64 is not .* = 48"),
    ],
)
def test_batch_sizes_that_do_not_agree(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_sizes(*given, 2)


def table(*stages: Any, pp: int = 2, layers: int | None = 4) -> dict[str, Any]:
    return dist(
        pipeline_parallel_size=pp,
        pipeline_num_layers=layers,
        custom_pipeline_stage_id=list(stages),
        num_nodes=1,
    )


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (dist(tensor_parallel_size=8), 4, "there are only 4 ranks.*use a divisor of 4"),
        (dist(tensor_parallel_size=3), 8, "8 ranks are not a multiple of .* = 3: start 6 or 9"),
        (dist(data_parallel_size=2, tensor_parallel_size=2), 8, "the data-parallel size is 4"),
        (
            dist(tensor_parallel_size=4, pipeline_parallel_size=4, pipeline_num_layers=4),
            8,
            "= 16: start 16 or 32",
        ),
        (dist(pipeline_parallel_size=2), 2, "pipeline_num_layers must be set"),
        (dist(pipeline_parallel_size=4, pipeline_num_layers=3), 4, "3 layers cannot fill 4 stages"),
        (dist(), None, "number of ranks is not known.*--world-size"),
        (table(0, 0, 1), 2, "has 3 entries for pipeline_num_layers=4"),
        (table(0, 0, 1, 2), 2, "holds 2.*stages are 0 ... 1"),
        (table(0, 0, 1, 2), 4, "holds 2.*stages are 0 ... 1"),  # less than the ranks, but no stage
        (table(0, 0, 1, -1), 2, "holds -1"),
        (table(0, 0, 1, True), 2, "holds True"),
        (table(0, 0, 0, 0), 2, "leaves stage 1 without a layer"),
        (
            dist(pipeline_parallel_size=2, pipeline_num_layers=4, custom_pipeline_stage_id=3),
            2,
            "must be a list",
        ),
        (dist(num_nodes=2, num_gpus_per_node=4), 4, "2 nodes x 4 devices are not 4 ranks"),
        (dist(num_gpus_per_node=8), 4, "4 ranks are not a multiple of 8"),
        (dist(num_nodes=3), 4, "4 ranks are not a multiple of 3"),
        (dist(device_type="tpu"), 1, "device_type must be one of"),
        (
            dist(tensor_parallel=2),
            2,
            "unknown key 'train.dist.tensor_parallel': did you mean 'tensor_parallel_size'",
        ),
        (dist(tensor_parallel_size="2"), 2, "must be a whole number of 1 or more"),
        ({"train": {"dist": {}, "global_batchsize": 3}}, 1, "unknown key 'train.global_batchsize'"),
        ({"train": {"dist": {}, "zero_optimization": {"enabled": True, "stage": 4}}}, 1, "stages 1, 2 and 3"),
        ({"train": {"dist": {}, "train_micro_batch_size": None}}, 1, "both None"),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], world_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(config, world_size=world_size)


def test_libais_own_clamping_only_on_demand() -> None:
    config = dist(
        tensor_parallel_size=8, pipeline_parallel_size=2, pipeline_num_layers=4, data_parallel_size=3
    )
    with pytest.raises(ConfigError):
        load_plan(config, world_size=4)
    plan = load_plan(config, world_size=4, overrides=["compat=libai"])
    assert (plan.tp_size, plan.pp_size, plan.dp_size) == (4, 1, 1)
    assert any("tensor size 8 -> 4, pipeline size 2 -> 1" in text for text in plan.warnings)
    assert any("data_parallel_size 3 -> 1" in text for text in plan.warnings)


def test_a_python_file_may_demand_the_clamping_too(tmp_path: Path) -> None:
    text = "train = dict(dist=dict(tensor_parallel_size=8))\ncompat = 'libai'\n"
    assert load_plan(file(tmp_path, text), world_size=4).tp_size == 4
    text = "from .common.train import train\ntrain.dist.tensor_parallel_size = 8\ncompat = 'libay'\n"
    with pytest.raises(ConfigError, match=r"compat must be one of .* did you mean 'libai'"):
        load_plan(file(tmp_path, text), world_size=4)


@pytest.mark.parametrize(
    ("name", "meant"), [("trian", "train"), ("TRAIN", "train"), ("compatt", "compat"), ("Compat", "compat")]
)
def test_a_misspelt_key_of_a_python_file_is_no_variable(tmp_path: Path, name: str, meant: str) -> None:
    text = f"train = dict(dist=dict())\n{name} = dict(num_accumulation_steps=8)\n"
    with pytest.raises(ConfigError, match=rf"unknown key '{name}': did you mean '{meant}'\?.*config.py"):
        load_plan(file(tmp_path, text), world_size=1)


def test_variables_of_real_python_files_are_left_alone(tmp_path: Path) -> None:
    names = (
        "model optim graph dataloader tokenization vocab_file data_prefix train_iter train_data trainer cfg"
    )
    text = "".join(f"{name} = 1\n" for name in names.split()) + "train = dict(dist=dict())\n"
    plan = load_plan(file(tmp_path, text), world_size=1)
    assert plan.notes == (f"not about parallelism, left alone: {', '.join(sorted(names.split()))}",)


def test_a_table_that_goes_back_is_a_warning() -> None:
    plan = load_plan(table(0, 1, 0, 1), world_size=2)
    assert plan.stage_of_layer(4) == (0, 1, 0, 1)
    assert any("goes back" in text for text in plan.warnings)


def test_nodes_say_the_number_of_ranks() -> None:
    assert load_plan(dist(num_nodes=2, num_gpus_per_node=4)).world_size == 8


def test_other_keys_of_train_are_named_and_left_alone() -> None:
    plan = load_plan({"train": {"dist": {}, "train_iter": 10, "test_micro_batch_size": 4}}, world_size=1)
    assert plan.notes == ("not about parallelism, left alone: train.test_micro_batch_size, train.train_iter",)
    zero = load_plan(
        {"train": {"dist": {}, "zero_optimization": {"enabled": True, "stage": 2}}}, world_size=1
    )
    assert zero.data_parallel.policy == "zero2"


def test_the_documents_sample_runs_once_the_layers_are_given(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "from .common.train import train\n...\n\ntrain.dist.pipeline_parallel_size = 8\n\n"
        "train.dist.pipeline_num_layers = model.cfg.hidden_layers\n",
    )
    with pytest.raises(
        ConfigError, match=r"pipeline_num_layers is model.cfg.hidden_layers, which is not known"
    ):
        load_plan(path, world_size=8)
    plan = load_plan(path, world_size=8, overrides=["train.dist.pipeline_num_layers=24"])
    assert plan.pp_size == 8
    assert any("LiBai's defaults stand in" in text for text in plan.warnings)


def test_relative_imports_of_files_that_are_there(tmp_path: Path) -> None:
    file(
        tmp_path,
        "train = dict(train_micro_batch_size=4, dist=dict(tensor_parallel_size=2, data_parallel_size=2))\n",
        "common/train.py",
    )
    file(
        tmp_path,
        "from libai.config import LazyCall\nfrom libai.models import BertForPreTraining\n"
        "cfg = dict(hidden_layers=8)\nmodel = LazyCall(BertForPreTraining)(cfg=cfg)\n",
        "common/models/bert.py",
    )
    path = file(
        tmp_path,
        "from .common.train import train\nfrom .common.models.bert import model\n"
        "train.dist.update(pipeline_parallel_size=2)\n"
        'train.dist["pipeline_num_layers"] = model.cfg.hidden_layers\n',
        "bert.py",
    )
    plan = load_plan(path)
    assert (plan.dp_size, plan.tp_size, plan.pp_size, plan.stages.num_layers) == (2, 2, 2, 8)
    assert plan.microbatches.size == 4
    assert str(plan.said("axis.tp").file).endswith("common/train.py")
    assert str(plan.said("axis.pp").file).endswith("bert.py:3")


def test_libais_own_train_file_leaves_the_data_size_open(tmp_path: Path) -> None:
    file(
        tmp_path,
        "from omegaconf import DictConfig\n"
        "from libai.config import LazyCall\nfrom libai.scheduler import WarmupCosineLR\n"
        "train = dict(\n"
        "    train_micro_batch_size=32, num_accumulation_steps=None, rdma_enabled=True,\n"
        "    dist=dict(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1),\n"
        "    scheduler=LazyCall(WarmupCosineLR)(warmup_factor=0.001),\n"
        ")\n"
        "train = DictConfig(train)\n",
        "common/train.py",
    )
    start = "from .common.train import train\ntrain.dist.tensor_parallel_size = 2\n"
    plan = load_plan(file(tmp_path, start), world_size=8)
    assert (plan.dp_size, plan.tp_size) == (4, 2)
    said = file(tmp_path, f"{start}train.dist.data_parallel_size = 1\n")
    with pytest.raises(ConfigError, match=r"data-parallel size is 4.*\[.*config.py:3\]"):
        load_plan(said, world_size=8)


def test_get_config_finds_a_file_of_the_folder(tmp_path: Path) -> None:
    file(tmp_path, "train = dict(dist=dict(tensor_parallel_size=2))\n", "configs/common/train.py")
    text = 'from libai.config import get_config\ntrain = get_config("common/train.py").train\n'
    assert load_plan(file(tmp_path, text), world_size=2).tp_size == 2


def test_a_value_that_is_not_there_can_be_changed_but_not_used(tmp_path: Path) -> None:
    lines = "from .common.train import train\nfrom .models import model\n"
    assigned = file(tmp_path, lines + "model.layers = 6\ntrain.dist.pipeline_num_layers = model.layers\n")
    assert load_plan(assigned, world_size=1).stages.num_layers == 6
    looped = file(tmp_path, lines + "train.dist.pipeline_num_layers = sum(model.depths)\n")
    with pytest.raises(ConfigError, match=r"model.depths is used as a value and is not known"):
        load_plan(looped, world_size=1)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("amp", {"enabled": "yes"}, "train.amp.enabled must be true or false"),
        ("amp", {"enable": True}, "unknown key 'train.amp.enable': did you mean 'enabled'"),
        ("activation_checkpoint", True, "train.activation_checkpoint must hold keys and values"),
        ("rdma_enabled", 1, "train.rdma_enabled must be true or false"),
        ("input_placement_device", "gpu", "train.input_placement_device must be one of"),
    ],
)
def test_what_libais_trainer_would_do_is_checked_too(key: str, value: Any, told: str) -> None:
    config = dist()
    config["train"][key] = value
    with pytest.raises(ConfigError, match=told):
        load_plan(config, world_size=1)
