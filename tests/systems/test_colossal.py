"""The Colossal-AI dialect: the forms of the document, the groups of each tensor mode, and its errors."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import ConfigError
from smp_lite.errors import SMPError
from smp_lite.systems import load_plan
from smp_lite.systems.load.supported import refuse_unsupported

DATA = Path(__file__).parent / "data"


def parallel(**sizes: Any) -> dict[str, Any]:
    return {"parallel": sizes}


@pytest.mark.parametrize(
    ("config", "pp", "tp", "mode"),
    [
        (parallel(pipeline={"size": 2}, tensor={"size": 4, "mode": "2d"}), 2, 4, "2d"),
        (parallel(pipeline=2, tensor={"size": 4, "mode": "2d"}), 2, 4, "2d"),
        (parallel(pipeline=2), 2, 1, None),
        (parallel(tensor={"size": 4, "mode": "2d"}), 1, 4, "2d"),
        (parallel(tensor={"size": 4, "mode": "1d"}), 1, 4, "1d"),
        (parallel(tensor={"size": 8, "mode": "2.5d", "depth": 2}), 1, 8, "2.5d"),
        (parallel(tensor={"size": 8, "mode": "3d"}), 1, 8, "3d"),
        (parallel(tensor={"size": 8, "mode": "sequence"}), 1, 8, "sequence"),
        (parallel(pipeline={"size": 4}), 4, 1, None),
        (parallel(tensor=1), 1, 1, None),
        (parallel(tensor={"size": 1}), 1, 1, None),
        ({"parallel": None}, 1, 1, None),
        ({}, 1, 1, None),
    ],
)
def test_the_forms_of_the_document(config: dict[str, Any], pp: int, tp: int, mode: str | None) -> None:
    plan = load_plan(config, world_size=16, dialect="colossal")
    assert (plan.pp_size, plan.tp_size, plan.dp_size) == (pp, tp, 16 // (pp * tp))
    assert plan.tensor.mode == mode


def test_2d_ranks_and_groups() -> None:
    plan = load_plan(parallel(pipeline=2, tensor={"size": 4, "mode": "2d"}), world_size=16)
    at = plan.topology.coordinate
    assert [r for r in range(16) if at(r)["dp"] == 0] == list(range(8))
    assert [r for r in range(16) if at(r)["pp"] == 0] == [*range(4), *range(8, 12)]
    assert [r for r in range(16) if plan.topology.group_rank("COL", r) == 0] == [
        r for r in range(16) if r % 4 < 2
    ]
    assert [plan.topology.group_rank("ROW", r) for r in range(16)] == [r % 2 for r in range(16)]
    assert plan.topology.group("TENSOR", 5) == (4, 5, 6, 7)


@pytest.mark.parametrize("tensor", [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}])
def test_cuboids_of_eight(tensor: dict[str, Any]) -> None:
    plan = load_plan(parallel(pipeline=2, tensor={"size": 8, **tensor}), world_size=32)
    at = plan.topology.coordinate
    assert [r for r in range(32) if at(r)["dp"] == 0] == list(range(16))
    assert [r for r in range(32) if at(r)["pp"] == 0] == [*range(8), *range(16, 24)]
    assert [plan.role_rank("tp", r) for r in range(32)] == [r % 8 for r in range(32)]


def test_2_5d_rank_is_column_row_depth() -> None:
    plan = load_plan(parallel(tensor={"size": 18, "mode": "2.5d", "depth": 2}), world_size=18)
    for t in range(18):
        at = plan.topology.coordinate(t)
        assert t == at["tp_col"] + 3 * (at["tp_row"] + 3 * at["tp_dep"])
    group = plan.topology.group
    assert group("ROW", 4) == (3, 4, 5)
    assert group("COL", 4) == (1, 4, 7)
    assert group("DEP", 4) == (4, 13)
    assert group("XZ", 4) == (1, 4, 7, 10, 13, 16)


def test_3d_rank_is_weight_input_output() -> None:
    plan = load_plan(parallel(tensor={"size": 27, "mode": "3d"}), world_size=27)
    for t in range(27):
        at = plan.topology.coordinate(t)
        assert t == at["tp_w"] + 3 * (at["tp_in"] + 3 * at["tp_out"])
    group = plan.topology.group
    assert group("WEIGHT", 13) == (12, 13, 14)
    assert group("INPUT", 13) == (10, 13, 16)
    assert group("OUTPUT", 13) == (4, 13, 22)
    assert group("INPUT_X_WEIGHT", 13) == tuple(range(9, 18))
    assert group("OUTPUT_X_WEIGHT", 13) == (3, 4, 5, 12, 13, 14, 21, 22, 23)


def test_sequence_groups_sum_gradients_over_data_too() -> None:
    plan = load_plan(parallel(pipeline=2, tensor={"size": 2, "mode": "sequence"}), world_size=8)
    assert plan.topology.group("SEQUENCE", 0) == (0, 1)
    assert plan.topology.group("SEQUENCE_DP", 0) == (0, 1, 4, 5)


def test_microbatches_chunks_and_partition_methods() -> None:
    config = {**parallel(pipeline=2), "num_microbatches": 4, "num_model_chunks": 2}
    plan = load_plan(config, world_size=2)
    assert (plan.schedule.name, plan.stages.num_chunks, plan.stages.owners) == ("virtual", 2, (0, 1, 0, 1))
    assert plan.microbatches.source == "slice"
    assert plan.bubble == Fraction(1, 9)
    assert plan.stage_of_layer(8, [4, 4, 4, 4, 8, 8, 1, 1]) == (0, 0, 1, 1, 2, 3, 3, 3)
    layered = load_plan({**parallel(pipeline=4), "partition_method": "layer"}, world_size=4)
    assert layered.stage_of_layer(10) == (0, 0, 1, 1, 2, 2, 2, 3, 3, 3)
    with pytest.raises(ConfigError, match=r"stage 0 would be empty.*allow_empty_stages"):
        layered.stage_of_layer(3)
    empty = load_plan(
        {**parallel(pipeline=4), "partition_method": "layer", "allow_empty_stages": True}, world_size=4
    )
    assert empty.stage_of_layer(3) == (1, 2, 3)


def test_who_shares_gradients() -> None:
    assert load_plan(parallel(), world_size=4).data_parallel.policy == "ddp"
    named = load_plan({**parallel(), "gradient_handler": [{"type": "MoeGradientHandler"}]}, world_size=4)
    assert (named.data_parallel.policy, named.data_parallel.handlers) == ("handlers", ("MoeGradientHandler",))
    assert load_plan({**parallel(), "zero": {"level": 2}}, world_size=4).data_parallel.policy == "zero2"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gradient_handler": [{"type": "MoeGradientHandler"}]}, "MoeGradientHandler is not supported"),
        ({"gradient_handler": ["ZeROGradientHandler"]}, "ZeROGradientHandler is not supported"),
        ({"gradient_handler": []}, "names no handler, so nothing would reduce gradients over the 2 replicas"),
        (
            {"gradient_handler": [{"type": "PipelineSharedModuleGradientHandler"}]},
            "over the 2 replicas, which would drift apart: add dict.type='DataParallelGradientHandler'",
        ),
        ({"gradient_handler": ["SequenceParallelGradientHandler"]}, "over the 2 replicas"),
        ({"fp16": {"mode": "naive"}}, "fp16.mode='naive': mixed precision"),
        ({"gradient_accumulation": 4}, "gradient_accumulation=4 is not supported"),
    ],
)
def test_what_cannot_run_as_it_says_is_refused(more: dict[str, Any], message: str) -> None:
    plan = load_plan({**parallel(pipeline=2), **more}, world_size=4)
    with pytest.raises(SMPError, match=message):
        refuse_unsupported(plan)


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        ({**parallel(pipeline=2), "gradient_handler": ["DataParallelGradientHandler"]}, 4),
        ({**parallel(pipeline=4), "gradient_handler": []}, 4),
        (
            {
                **parallel(tensor={"size": 2, "mode": "sequence"}),
                "gradient_handler": ["SequenceParallelGradientHandler"],
            },
            4,
        ),
        ({**parallel(pipeline=2), "fp16": None, "gradient_accumulation": 1}, 4),
        *((parallel(tensor={"size": 8, "mode": mode}), 16) for mode in ("1d", "3d", "sequence")),
    ],
)
def test_what_can_run(config: dict[str, Any], world_size: int) -> None:
    refuse_unsupported(load_plan(config, world_size=world_size))


@pytest.mark.parametrize("value", [{"max_norm": 0.05}, -1.0, True, "0.05", float("nan"), float("inf"), [1.0]])
def test_what_is_no_norm_is_refused_and_not_taken_for_none(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"clip_grad_norm must be.*Got clip_grad_norm=.*write clip_grad_norm=1"
    ):
        load_plan({**parallel(pipeline=2), "clip_grad_norm": value}, world_size=4)


@pytest.mark.parametrize("value", [None, 0, 0.0, 1, 0.05])
def test_norms(value: Any) -> None:
    plan = load_plan({**parallel(pipeline=2), "clip_grad_norm": value}, world_size=4)
    assert dict(plan.others) == {"clip_grad_norm": value}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (
            {"tensor": {"size": 999999999999, "mode": "2.5d", "depth": 7}},
            None,
            "is not q x q x depth.*depth=",
        ),
        ({"tensor": {"size": 10**30, "mode": "2.5d"}}, None, "needs depth.*depth=10{30}"),
        (
            {"data": 1, "tensor": {"size": 10**12, "mode": "2d"}},
            None,
            "10{12} ranks, and there are 100000 at",
        ),
        ({"tensor": {"size": 10**30 + 1, "mode": "2d"}}, None, "must be a square.*use .*10{30}"),
        ({"tensor": {"size": 10**30 - 1, "mode": "3d"}}, None, "must be a cube.*use .*10{30}"),
        ({"data": 1, "pipeline": 10**12}, None, "10{12} ranks"),
        ({"pipeline": 2}, 10**12, "world_size is 10{12}"),
    ],
)
def test_huge_sizes_are_told_at_once(sizes: dict[str, Any], world_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(parallel(**sizes), world_size=world_size)


def test_many_stages_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"stages, and there are 100000.*num_model_chunks=1000000000"):
        load_plan({**parallel(data=1), "num_model_chunks": 10**9})


def test_data_may_be_said_where_it_is_right() -> None:
    plan = load_plan(parallel(data=4, pipeline=2))
    assert (plan.world_size, plan.dp_size) == (8, 4)
    assert plan.said("axis.dp").key == "parallel.data" and not plan.said("axis.dp").is_default
    inferred = load_plan(parallel(pipeline=2), world_size=8).said("axis.dp")
    assert inferred.is_default and inferred.is_inferred


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (parallel(pipeline=2, tensor=4), 8, "you need to specify the mode for tensor parallelism.*mode='1d'"),
        (parallel(tensor={"size": 4}), 8, "you need to specify the mode"),
        (parallel(tensor={"size": 4, "mode": None}), 8, "you need to specify the mode"),
        (parallel(tensor={"size": 4, "mode": "2D"}), 8, "must be one of None, '1d'.*did you mean '2d'"),
        (parallel(tensor={"mode": "2d"}), 8, "parallel.tensor has no size"),
        (parallel(tensor={"size": 8, "mode": "2d"}), 8, "must be a square.*use 1, 4, 9, 16"),
        (parallel(tensor={"size": 4, "mode": "3d"}), 4, "must be a cube.*use 1, 8, 27"),
        (parallel(tensor={"size": 8, "mode": "2.5d"}), 8, "needs depth.*add depth=2 or depth=8"),
        (parallel(tensor={"size": 8, "mode": "2.5d", "depth": 4}), 8, "use depth=2, depth=8.*sizes"),
        (parallel(tensor={"size": 4, "mode": "2d", "depth": 1}), 4, "unknown key 'parallel.tensor.depth'"),
        (parallel(pipeline={}), 4, "parallel.pipeline has no size"),
        (parallel(pipeline="2"), 4, "must be an int or a dict"),
        (parallel(pipeline=True), 4, "must be an int or a dict"),
        (parallel(pipeline=0), 4, "whole number of 1 or more.*: write 1 or more$"),
        (parallel(pipeline=-2), 4, "parallel.pipeline=-2.*: write 1 or more$"),
        ({**parallel(), "num_microbatches": 0}, 4, "num_microbatches=0.*: write 1 or more$"),
        ({**parallel(), "num_microbatches": "2"}, 4, "without quotes"),
        ({**parallel(), "zero": {"level": 0}}, 4, "zero.level=0.*: write 1 or more$"),
        (parallel(pipeline={"size": 2, "chunks": 2}), 4, "unknown key 'parallel.pipeline.chunks'"),
        (parallel(pipelines=2), 4, "unknown key 'parallel.pipelines': did you mean 'pipeline'"),
        (parallel(pipeline=3), 8, "8 ranks are not a multiple of pipeline 3 x tensor 1 = 3: start 6 or 9"),
        (parallel(data=4, pipeline=4), 8, "parallel.data must be 2.*Got parallel.data=4"),
        (parallel(pipeline=4), None, "number of ranks is not known: a replica has 4.*--world-size"),
        (
            {**parallel(pipeline=4), "num_microbatches": 6, "num_model_chunks": 2},
            4,
            "multiple of the pipeline",
        ),
        (
            {**parallel(), "partition_method": "layers"},
            4,
            "partition_method must be one of.*did you mean 'layer'",
        ),
        ({**parallel(), "gradient_handler": {"type": "x"}}, 4, "gradient_handler must be a list"),
        ({**parallel(pipeline=2), "zero": {"level": 2}}, 4, "A pipeline does not go with zero level 2"),
        ({**parallel(), "zero": {"level": 4}}, 4, "level=1, 2 or 3"),
        ({**parallel(), "num_chunks": 2, "num_model_chunks": 2}, 4, "two names of one thing"),
        (
            {**parallel(), "num_microbatch": 2},
            4,
            "unknown key 'num_microbatch': did you mean 'num_microbatches'",
        ),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], world_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(config, world_size=world_size)


def test_a_python_file_says_line_and_leaves_the_rest_alone() -> None:
    plan = load_plan(DATA / "colossal.py", world_size=16)
    assert (plan.pp_size, plan.tp_size, plan.microbatches.count) == (2, 4, 4)
    assert plan.notes == ("not about parallelism, left alone: BATCH_SIZE",)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NUM_MICRO_BATCHS", "NUM_MICRO_BATCHES"),
        ("NUM_MICROBATCHES", "NUM_MICRO_BATCHES"),
        ("num_micro_batches", "NUM_MICRO_BATCHES"),
        ("NUM_CHUNKS", "num_chunks"),
        ("gradient_accumulaton", "gradient_accumulation"),
        ("clip_grad_nrom", "clip_grad_norm"),
        ("cliip_grad_norm", "clip_grad_norm"),
        ("zero_", "zero"),
        ("fp61", "fp16"),
    ],
)
def test_a_misspelt_key_of_a_python_file_is_no_variable(tmp_path: Path, name: str, meant: str) -> None:
    path = tmp_path / "config.py"
    path.write_text(f"parallel = dict(pipeline=2)\n{name} = 4\n")
    text = (
        rf"unknown key '{name}': did you mean '{meant}'\? .* underscore: _{name.strip('_')} \[.*config.py\]"
    )
    with pytest.raises(ConfigError, match=text):
        load_plan(path, world_size=2)
    path.write_text(f"parallel = dict(pipeline=2)\n_{name} = 4\n")
    assert load_plan(path, world_size=2).notes == ()


def test_variables_of_real_python_files_are_left_alone(tmp_path: Path) -> None:
    names = (
        "BATCH_SIZE GLOBAL_BATCH_SIZE TOTAL_BATCH_SIZE MICRO_BATCH_SIZE NUM_BATCHES NUM_EPOCHS WARMUP_EPOCHS "
        "LEARNING_RATE WEIGHT_DECAY HIDDEN_SIZE IMG_SIZE PATCH_SIZE DEPTH NUM_HEADS NUM_ATTENTION_HEADS "
        "NUM_LAYERS MLP_RATIO NUM_CLASSES CHECKPOINT SEQ_LENGTH VOCAB_SIZE DROP_RATE PIPELINE "
        "PIPELINE_PARALLEL TENSOR_PARALLEL TENSOR_PARALLEL_SIZE TENSOR_PARALLEL_MODE TENSOR_SHAPE MODE SEED "
        "LOG_PATH TRAIN_ITERS model optimizer loss loss_fn lr_scheduler hooks seed world_size host port "
        "gradient_clipping clip_grad max_grad_norm gradient_checkpointing use_zero bf16 parallel_size"
    )
    path = tmp_path / "config.py"
    path.write_text("".join(f"{name} = 1\n" for name in names.split()) + "parallel = dict(pipeline=2)\n")
    plan = load_plan(path, world_size=2)
    assert plan.notes == (f"not about parallelism, left alone: {', '.join(sorted(names.split()))}",)


def test_a_variable_that_is_the_value_of_its_key_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    text = "parallel = dict(pipeline=2)\nZERO = dict(level=1)\nzero = ZERO\nNUM_MICROBATCHES = 4\n"
    path.write_text(f"{text}num_microbatches = NUM_MICROBATCHES\n")
    assert load_plan(path, world_size=2).microbatches.count == 4
    path.write_text(f"{text}num_microbatches = NUM_MICROBATCHES // 2\n")
    with pytest.raises(ConfigError, match="unknown key 'NUM_MICROBATCHES': did you mean"):
        load_plan(path, world_size=2)


def test_what_a_python_file_imports_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "from colossalai.amp import AMP_TYPE\n"
        "import colossalai.nn as col_nn\n"
        "SIZE = 2\n"
        "parallel = dict(pipeline=SIZE, tensor=dict(size=SIZE * 2, mode='1d'))\n"
        "fp16 = dict(mode=AMP_TYPE.NAIVE)\n"
        "NUM_MICRO_BATCHES = 4\n"
    )
    plan = load_plan(path, world_size=8)
    assert (plan.pp_size, plan.tp_size, plan.microbatches.count) == (2, 4, 4)
    assert dict(plan.others) == {"fp16.mode": "colossalai.amp.AMP_TYPE.NAIVE"}
    assert any("was not loaded" in warning for warning in plan.warnings)


def test_an_error_in_a_python_file_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("a = 1\nparallel = dict(pipeline=1 / 0)\n")
    with pytest.raises(ConfigError, match=r"config.py:2 cannot be run: ZeroDivisionError"):
        load_plan(path, world_size=8)
    path.write_text("import sys\nparallel = dict(pipeline=2)\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"config.py:3 cannot be run: SystemExit: 0"):
        load_plan(path, world_size=8)
    path.write_text("parallel = dict(\n")
    with pytest.raises(ConfigError, match="is not valid Python"):
        load_plan(path, world_size=8)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"fp16": {"mode": "half"}}, "fp16.mode must be one of 'torch', 'apex', 'naive'"),
        ({"fp16": {"level": 1}}, "fp16.mode must be one of"),
        ({"gradient_accumulation": "4"}, "gradient_accumulation must be a whole number"),
        ({"gradient_accumulation": 0}, "gradient_accumulation must be a whole number of 1 or more"),
    ],
)
def test_what_is_only_carried_is_checked_too(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_plan({**parallel(pipeline=2), **more}, world_size=4)


def test_the_names_of_the_documentation_come_by_a_star_too() -> None:
    import smp_lite.colossal

    names: dict[str, Any] = {}
    exec("from smp_lite.systems.colossal import *", names)
    assert {name: names[name] for name in smp_lite.colossal.__all__} == {
        name: getattr(smp_lite.colossal, name) for name in smp_lite.colossal.__all__
    }


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("from parts_that_are_elsewhere import parallel", "parallel"),
        ("from parts_that_are_elsewhere import N\nNUM_MICRO_BATCHES = N", "NUM_MICRO_BATCHES"),
        ("import parts_that_are_elsewhere as cfg\nparallel = cfg.parallel", "parallel"),
    ],
)
def test_a_key_from_a_file_that_is_not_there_is_an_error(line: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "conf.py"
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=rf"^{key} is parts_that_are_elsewhere\.\w+, which is not known"):
        load_plan(path, world_size=2, dialect="colossal")
