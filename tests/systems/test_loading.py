"""Which system a configuration is for, command-line changes, the SageMaker dialect, and the plan itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import ConfigError
from smp_lite.plan.topology import SMP_GROUPS, Topology
from smp_lite.systems import DIALECTS, ParallelPlan, load_plan
from smp_lite.systems.plan.parallel_plan import AXIS_ROLES, group_kinds
from smp_lite.systems.plan.stage_assignment import StageRule
from smp_lite.systems.reading.texts import read_literal

DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parents[2]
HUGE = 10**9


def libai(accumulation: int | None = None, **dist: int) -> dict[str, Any]:
    return {"train": {"dist": dist, "num_accumulation_steps": accumulation}}


@pytest.mark.parametrize(
    ("source", "world_size", "overrides", "dialect"),
    [
        ("sagemaker.json", 8, (), "sagemaker"),
        ("enflame.json", None, (), "enflame"),
        ("colossal.py", 16, (), "colossal"),
        ("libai.py", 8, (), "libai"),
        ("llama_fsdp.yaml", 4, ("ici_mesh.fsdp=4",), "torchprime"),
        ("mixtral_fsdp.yaml", 4, ("ici_mesh.fsdp=4",), "torchprime"),
        ("llama_fsdp_tp.yaml", None, (), "torchprime"),
        ({"pipeline_parallel_degree": 2}, None, (), "sagemaker"),
        ({"stage_cnt": 2}, None, (), "enflame"),
        ({"parallel": {"data": 2}}, None, (), "colossal"),
        ({"train": {"dist": {"data_parallel_size": 2}}}, None, (), "libai"),
        ({"": ["fsdp"]}, None, ("ici_mesh.fsdp=2",), "torchprime"),
    ],
)
def test_a_configuration_is_known_by_its_shape(
    source: Any, world_size: int | None, overrides: tuple[str, ...], dialect: str
) -> None:
    path = DATA / source if isinstance(source, str) else source
    plan = load_plan(path, world_size=world_size, overrides=overrides)
    assert plan.dialect == dialect
    named = load_plan(path, world_size=world_size, overrides=overrides, dialect=dialect)
    assert named == plan and hash(named) == hash(plan)
    fields = {name for name, _ in plan.provenance}
    assert {"stages", "schedule", *(f"axis.{name}" for name, _ in plan.topology.axes)} <= fields
    assert all(said.dialect == dialect for _, said in plan.provenance)


def test_what_is_none_or_several_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Looked for: sagemaker: partitions.*libai: train.*--dialect"):
        load_plan({"x": 1})
    with pytest.raises(ConfigError, match="may be a configuration of sagemaker or of enflame"):
        load_plan({"partitions": 2, "stage_cnt": 2})
    with pytest.raises(ConfigError, match=r"give what is under smdistributed.modelparallel.parameters"):
        load_plan({"smdistributed": {"modelparallel": {"parameters": {"partitions": 2}}}})
    path = tmp_path / "both.py"
    path.write_text("parallel = dict()\ntrain = dict(dist=dict())\n")
    with pytest.raises(ConfigError, match="of colossal or of libai"):
        load_plan(path, world_size=1)
    assert load_plan(path, world_size=1, dialect="colossal").dialect == "colossal"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="not a configuration of the five systems"):
        load_plan(path, world_size=1)
    assert load_plan(path, world_size=2, dialect="colossal").dp_size == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere.json' is not a file"):
        load_plan("nowhere.json")
    path = tmp_path / "a.toml"
    path.write_text("partitions = 2\n")
    with pytest.raises(ConfigError, match=r"neither .json, .yaml, .yml nor .py"):
        load_plan(path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_plan(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="is Python, and a sagemaker configuration is not"):
        load_plan(DATA / "colossal.py", dialect="sagemaker")
    with pytest.raises(ConfigError, match="unknown dialect 'megatron': choose from sagemaker"):
        load_plan({"partitions": 2}, dialect="megatron")
    with pytest.raises(ConfigError, match="world_size must be a whole number"):
        load_plan({"partitions": 2}, world_size=0)


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.py", "a.cfg"])
def test_files_that_are_no_text_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=rf"{name} is no text in UTF-8 .*: save it as such"):
        load_plan(path)
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a file that not even root can read
    with pytest.raises(ConfigError, match=rf"{name} cannot be read \(Input/output error\)"):
        load_plan(path)


@pytest.mark.parametrize(
    ("source", "world_size", "override", "field", "value"),
    [
        ("sagemaker.json", 8, "partitions=2", "pp_size", 2),
        ("sagemaker.json", 8, "pipeline='simple'", "schedule.name", "gpipe"),
        ("enflame.json", None, "accum_degree=3", "microbatches.count", 3),
        ("enflame.json", None, "device_mapping.stage_0.shard_0=dtu", "placement.labels", None),
        ("colossal.py", 16, "parallel.pipeline=4", "pp_size", 4),
        ("colossal.py", 32, "parallel.tensor.size=16", "tp_size", 16),
        ("colossal.py", 8, "parallel.tensor=dict(size=2, mode='1d')", "tp_size", 2),
        ("libai.py", 4, "train.dist.custom_pipeline_stage_id=[0]*18+[1]*2+[2]*2+[3]*2", "stages.table", None),
        ("libai.py", 8, "train.amp.enabled=true", "others", None),
        ("llama_fsdp_tp.yaml", None, "ici_mesh.context=4", "world_size", 16),
    ],
)
def test_changes_in_each_systems_words(
    source: str, world_size: int | None, override: str, field: str, value: Any
) -> None:
    before: Any = load_plan(DATA / source, world_size=world_size)
    after: Any = load_plan(DATA / source, world_size=world_size, overrides=[override])
    for name in field.split("."):
        before, after = getattr(before, name), getattr(after, name)
    assert after != before
    if value is not None:
        assert after == value


def test_a_change_says_so() -> None:
    plan = load_plan(DATA / "sagemaker.json", world_size=8, overrides=["partitions=2", "partitions=8"])
    assert plan.pp_size == 8
    assert plan.said("axis.pp").file == "command line"


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("libai.py", "~train.dist", "cannot be deleted"),
        ("libai.py", "+train.dist.x=1", r"without '\+'"),
        ("libai.py", "model.cfg=1", "unknown key 'model.cfg': keys begin with train."),
        ("libai.py", "train.dist.tensor_parallel=1", "did you mean 'tensor_parallel_size'"),
        ("libai.py", "train.micro=1", "unknown key 'train.micro'"),
        ("colossal.py", "paralel.pipeline=2", "did you mean 'parallel'"),
        ("enflame.json", "shardingsize=2", "unknown key 'shardingsize'"),
        ("sagemaker.json", "partition=2", "did you mean 'partitions'"),
        ("sagemaker.json", "partitions", "is not key=value"),
        ("llama_fsdp_tp.yaml", "fsdp=2", "unknown key 'fsdp'"),
    ],
)
def test_changes_that_are_refused(source: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(DATA / source, world_size=8, overrides=[override])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("-1", -1),
        ("None", None),
        ("null", None),
        ("true", True),
        ("True", True),
        ("[0]*2 + [1]", [0, 0, 1]),
        ("[fsdp, null]", ["fsdp", None]),
        ("[[fsdp, tensor], null]", [["fsdp", "tensor"], None]),
        ("2.5d", "2.5d"),
        ("'1d'", "1d"),
        ("dict(size=4, mode='2d')", {"size": 4, "mode": "2d"}),
        ("{size: 2}", {"size": 2}),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_values_of_the_command_line(text: str, value: Any) -> None:
    assert read_literal(text, "key") == value


def test_long_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="too long"):
        read_literal("[0] * 10000000", "key")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"partitions": 1 << 20}, "makes 1048576 ranks, and there are 100000 at most. Got partitions="),
        ({"stage_cnt": HUGE}, "makes 4000000000 devices.* Got stage_cnt=1000000000"),
        (
            {"stage_cnt": 2, "sharding_size": HUGE, "mode": "pipeline"},
            "devices.* Got sharding_size=1000000000",
        ),
        (
            {"stage_cnt": 2, "accum_degree": HUGE},
            "makes 1000000000 microbatches of a step.* Got accum_degree=",
        ),
        ({"parallel": {"data": HUGE}}, "makes 1000000000 ranks"),
        (libai(data_parallel_size=HUGE), "makes 1000000000 ranks.* Got train.dist="),
        (
            libai(data_parallel_size=1, pipeline_num_layers=HUGE),
            "layers.* Got train.dist.pipeline_num_layers=",
        ),
        (libai(num_nodes=HUGE, num_gpus_per_node=8), "makes 8000000000 ranks"),
        (libai(data_parallel_size=1, accumulation=HUGE), "microbatches of a step.* Got train.num_accum"),
        ({"ici_mesh": {"data": HUGE}}, "makes 1000000000 ranks.* Got ici_mesh={'data': 1000000000}"),
        ({"dcn_mesh": {"fsdp": HUGE}}, "Got dcn_mesh={'fsdp': 1000000000}"),
        ({"ici_mesh": {"data": 2}, "smp": {"partitions": 1 << 20}}, "makes 2097152 ranks.* Got smp="),
    ],
)
def test_sizes_that_no_job_has_are_an_error_at_once(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_plan(config)


def test_smp_layouts() -> None:
    spread = load_plan({"partitions": 2, "ddp": True, "placement_strategy": "spread"}, world_size=8)
    assert spread.topology == Topology.from_placement(8, 2, 1, "spread")
    assert [spread.topology.group_rank("MP", rank) for rank in (1, 6)] == [0, 1]
    assert spread.topology.group_rank("DP", 6) == 2
    cluster = load_plan({"partitions": 4, "ddp": True}, world_size=8)
    assert cluster.topology.groups("MP") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cluster.said("axes").is_default


def test_smp_tensor_parallelism() -> None:
    config = {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}
    plan = load_plan(config, world_size=8)
    assert plan.topology.axes == (("dp", 2), ("pp", 2), ("tp", 2))
    assert plan.tensor.mode == "smp" and not plan.said("axis.tp").is_default
    with pytest.raises(ConfigError, match="any multiple of partitions=2 x tensor_parallel_degree=2"):
        load_plan(config)


def test_smp_schedule_stages_and_data() -> None:
    plan = load_plan({"partitions": 2, "microbatches": 4})
    assert plan.world_size == 2 and plan.data_parallel.policy == "none"
    assert (plan.schedule.name, plan.schedule.max_in_flight, plan.schedule.strict) == ("1f1b", 4, True)
    assert (plan.microbatches.count, plan.microbatches.source) == (4, "slice")
    speed = load_plan({"partitions": 2, "optimize": "speed", "pipeline": "simple"})
    assert (speed.schedule.name, speed.schedule.strict) == ("gpipe", False)
    assert speed.stages.memory_weight == 0.2
    manual = load_plan({"partitions": 2, "auto_partition": False, "default_partition": 1})
    assert (manual.stages.kind, manual.stages.default_stage) == ("contexts", 1)
    stored = load_plan({"partitions": 2, "load_partition": True, "partition_file": "p.json"})
    assert (stored.stages.kind, stored.stages.file) == ("file", "p.json")
    hinted = load_plan({"partitions": 2, "fast_mode": True, "deterministic_server": True})
    assert dict(hinted.others) == {"fast_mode": True, "deterministic_server": True}
    assert "taken as hints" in hinted.notes[0]


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        ({"partitions": 2}, 8, "data parallelism is off"),
        ({"partitions": 3, "ddp": True}, 8, "not a multiple of partitions"),
        ({"partitions": 4, "ddp": True}, None, "number of ranks is not known.*--world-size"),
        ({"partitions": 2, "auto_partition": False}, 2, "default_partition must be supplied"),
        ({"partitions": "2"}, 2, "must be a positive integer"),
        ({"partitions": 2, "micro_batches": 4}, 2, "did you mean 'microbatches'"),
    ],
)
def test_smp_errors_are_those_of_its_own_checks(
    config: dict[str, Any], world_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(config, world_size=world_size)


def test_kinds_of_groups_are_smps_on_its_axes() -> None:
    assert group_kinds((("dp", 2), ("pp", 2), ("tp", 2))) == SMP_GROUPS
    kinds = dict(group_kinds((("dp", 2), ("pp", 2), ("tp_row", 2), ("tp_col", 2))))
    assert kinds["MP"] == ("pp", "tp_row", "tp_col") and kinds["TP"] == ("tp_row", "tp_col")
    assert kinds["DP"] == ("dp", "tp_row", "tp_col") and kinds["RDP"] == ("dp",)


def test_a_plan_names_who_said_each_field() -> None:
    topology = Topology((("pp", 2),), ())
    with pytest.raises(ValueError, match="nobody is named as having said"):
        ParallelPlan(dialect="libai", topology=topology, stages=StageRule("libai", (0, 1)))
    plan = load_plan({"partitions": 2})
    with pytest.raises(AttributeError):
        plan.dialect = "other"  # type: ignore[misc]
    assert set(AXIS_ROLES.values()) == {"pp", "dp", "tp", "ep", "cp"}


def test_the_same_mesh_in_four_dialects_has_the_same_sizes() -> None:
    plans = [
        load_plan({"partitions": 4, "ddp": True, "microbatches": 4}, world_size=8),
        load_plan({"parallel": {"pipeline": 4}, "num_microbatches": 4}, world_size=8),
        load_plan(
            {
                "train": {
                    "dist": {"pipeline_parallel_size": 4, "pipeline_num_layers": 8},
                    "num_accumulation_steps": 4,
                }
            },
            world_size=8,
        ),
    ]
    assert {(p.pp_size, p.dp_size, p.tp_size, p.microbatches.count, p.bubble) for p in plans} == {
        (4, 2, 1, 4, plans[0].bubble)
    }
    # Ranks 0 and 1 are one replica's stages for two of them, and two replicas of a stage for LiBai.
    assert [p.topology.group("PP", 0) for p in plans] == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 4, 6)]


def test_planning_imports_neither_torch_nor_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"partitions": 2}))
    modules = [
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for file in (REPOSITORY / "smp_lite" / "systems").rglob("*.py")
    ]
    assert len(modules) > len(DIALECTS)
    program = (
        f"import {', '.join(modules)}, sys\n"
        "from smp_lite.cli import main\n"
        f"main(['explain', {str(tmp_path / 'c.json')!r}])\n"
        f"main(['explain', {str(DATA / 'libai.py')!r}, '--world-size', '8', '--as', 'colossal'])\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules), 'loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
