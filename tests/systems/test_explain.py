"""What `smp-lite explain` prints, what a plan makes of a model, and other systems' words for a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_lite.cli import main
from smp_lite.systems import DIALECTS, ParallelPlan, load_plan
from smp_lite.systems.plan.model_placement import check_model, place_model
from smp_lite.systems.plan.model_shape import ModelShape, build_model_shape, layer_names, layers_of_tensors
from smp_lite.systems.showing.conversion import compare_plans, convert, load_text
from smp_lite.systems.showing.explain import explain_plan
from smp_lite.systems.showing.text_parts import WIDTH, group_text

DATA = Path(__file__).parent / "data"
MODELS = "tests.systems.models"
FILES: dict[str, tuple[str, ...]] = {
    "sagemaker.json": ("--world-size", "8"),
    "enflame.json": (),
    "colossal.py": ("--world-size", "16"),
    "libai.py": ("--world-size", "8"),
    "llama_fsdp.yaml": ("ici_mesh.fsdp=4",),
    "mixtral_fsdp.yaml": ("ici_mesh.fsdp=4",),
    "llama_fsdp_tp.yaml": (),
}
Explain = Callable[..., str]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(*arguments: str, code: int = 0) -> str:
        assert main(["explain", *arguments]) == code
        out, err = capsys.readouterr()
        return err if code == 2 else out

    return run


def plan_of(name: str) -> ParallelPlan:
    given = FILES[name]
    world_size = int(given[1]) if given[:1] == ("--world-size",) else None
    overrides = given if world_size is None else ()
    return load_plan(DATA / name, world_size=world_size, overrides=overrides)


def row(text: str, start: str) -> list[str]:
    """The words of the first line that begins so."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


@pytest.mark.parametrize("name", FILES)
def test_every_dialect_is_explained_in_the_width_of_a_terminal(name: str, explain: Explain) -> None:
    plan = plan_of(name)
    layers = ["train.dist.pipeline_num_layers=4", "train.dist.custom_pipeline_stage_id=[0,1,2,3]"]
    change = layers if name == "libai.py" else ["stage_cnt=4"] if name == "enflame.json" else []
    if change == ["stage_cnt=4"]:
        change.append(f"device_mapping={plan_of('enflame.json').placement.labels and _half_map()}")
    model = f"{MODELS}:llama"
    with_model = explain(str(DATA / name), *FILES[name], "--model", model, *change)
    for text in (explain(str(DATA / name), *FILES[name]), with_model):
        assert max(map(len, text.splitlines())) <= WIDTH
    text = explain(str(DATA / name), *FILES[name])
    assert row(text, "ranks")[1] == str(plan.world_size)
    assert row(text, "layout")[3] == next(axis for axis, size in plan.topology.axes if size > 1)
    for kind, _ in plan.topology.kinds:
        assert kind in text
    assert "model.layers" in with_model and "local shape" in with_model


def _half_map() -> dict[str, dict[str, str]]:
    return {f"stage_{s}": {f"shard_{k}": f"dtu:{5 * s + k}" for k in range(4)} for s in range(4)}


def test_values_name_the_key_that_said_them(explain: Explain) -> None:
    text = explain(str(DATA / "libai.py"), "--world-size", "8", "train.amp.enabled=true")
    assert "train.dist.pipeline_parallel_size," in text and "libai.py:3" in text
    assert "6, 7, 7, 4 of 24 layers" in text
    assert row(text, "amp.enabled") == ["amp.enabled", "True", "train.amp.enabled,", "command", "line"]
    assert row(text, "tensor (tp)")[2:] == ["1", "default"]
    assert "inferred: 8 ranks / (tensor 1 x" in text
    assert "8 of 8 samples" in text and "128 samples a step" in text


def test_options_and_changes_may_be_mixed(explain: Explain) -> None:
    text = explain("enflame=", "--world-size", "8", code=2)
    assert "'enflame=' is not a file" in text
    text = explain(
        str(DATA / "colossal.py"), "parallel.pipeline=4", "--world-size", "16", "num_microbatches=8"
    )
    assert row(text, "pipeline")[2] == "4"
    assert row(text, "microbatches")[1] == "8:"


def test_errors_are_one_line_and_exit_code_2(explain: Explain, tmp_path: Path) -> None:
    text = explain(str(DATA / "colossal.py"), code=2)
    assert text.startswith("smp-lite explain: the number of ranks is not known") and text.count("\n") == 1
    assert "32 ranks (they need not be said" in explain(
        str(DATA / "enflame.json"), "--world-size", "8", code=2
    )
    for target, message in [
        ("tests.systems.models", "write package:function"),
        ("no_such_package:f", "cannot be imported"),
        (f"{MODELS}:nothing", "has no 'nothing'"),
        (f"{MODELS}:no_model", "must return an nn.Module"),
        (f"{MODELS}:raising", f"{MODELS}:raising raised KeyError: 'mine' ["),
        ("sys:exit", "sys:exit raised SystemExit: "),
    ]:
        assert message in explain(str(DATA / "llama_fsdp_tp.yaml"), "--model", target, code=2)


def test_sizes_that_do_not_divide_are_told_with_the_nearest(explain: Explain) -> None:
    text = explain(
        str(DATA / "colossal.py"),
        "--world-size",
        "16",
        "--model",
        f"{MODELS}:odd",
        "partition_method=layer",
        code=1,
    )
    flat = " ".join(text.split())
    assert (
        "model.layers.0.mlp.up_proj.weight has size 9 in dimension 0, which 2 ranks do not divide "
        "(parallel.tensor.size)" in flat
    )
    assert "nearest sizes that do are 8 and 10 (and 3 more layers)" in flat


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ((0, 1, 2, 3), "0-3"),
        ((0, 1), "0,1"),
        ((0, 2, 4, 6), "0,2,4,6"),
        ((0, 4, 8, 12, 16), "0,4,...,16"),
        ((0, 1, 4, 5), "0,1,4,5"),
        (tuple(range(8)) + tuple(range(16, 24)), "0,1,2,3,...,23"),
    ],
)
def test_groups_as_text(group: tuple[int, ...], text: str) -> None:
    assert group_text(group) == text


def test_many_ranks_are_cut_short() -> None:
    plan = load_plan({"partitions": 8, "ddp": True}, world_size=512)
    text = explain_plan(plan, "x")
    assert len(text.splitlines()) < 45
    assert " and 58 more" in text and "511" in text


def tensors(config: dict[str, Any], model: ModelShape, world_size: int | None = None) -> dict[str, Any]:
    plan = load_plan(config, world_size=world_size)
    return {tensor.name: tensor for tensor in check_model(plan, model).tensors}


def test_modes_of_tensor_parallelism_on_a_model() -> None:
    model = build_model_shape(f"{MODELS}:llama")
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    embedding = "model.embed_tokens.weight"
    shapes = {}
    for mode, size in (("1d", 4), ("2d", 4), ("3d", 8), ("sequence", 4), ("2.5d", 8)):
        extra = {"depth": 2} if mode == "2.5d" else {}
        found = tensors({"parallel": {"tensor": {"size": size, "mode": mode, **extra}}}, model, size)
        shapes[mode] = [found[name].local_shape for name in (up, norm, embedding)]
    # up_proj is [32, 16], the norm 16, the embedding [64, 16].
    assert shapes == {
        "1d": [(8, 16), (16,), (16, 16)],
        "2d": [(16, 8), (4,), (64, 4)],
        "3d": [(16, 4), (8,), (64, 8)],
        "sequence": [(32, 16), (16,), (64, 16)],
        "2.5d": [(16, 8), (4,), (64, 4)],
    }


def test_every_rank_of_a_mode_holds_its_chunk_and_all_chunks_are_held() -> None:
    from smp_lite.systems.plan.sharding_rules import holders

    plan = load_plan({"parallel": {"tensor": {"size": 8, "mode": "3d"}}}, world_size=8)
    placed = check_model(plan, build_model_shape(f"{MODELS}:llama")).tensors
    for tensor in placed:
        chunks = holders(plan, tensor.dims)
        assert sorted(rank for ranks in chunks.values() for rank in ranks) == list(range(8))
        assert len({len(ranks) for ranks in chunks.values()}) == 1


def test_stages_of_a_model_by_libais_convention() -> None:
    model = build_model_shape(f"{MODELS}:llama")
    config = {"train": {"dist": {"pipeline_parallel_size": 2, "pipeline_num_layers": 4}}}
    stage = {name: tensor.stage for name, tensor in tensors(config, model, 2).items()}
    assert stage["model.embed_tokens.weight"] == 0
    assert stage["model.layers.1.mlp.up_proj.weight"] == 0 and stage["model.layers.2.mlp.up_proj.weight"] == 1
    assert stage["model.norm.weight"] == stage["lm_head.weight"] == 1
    tied = tensors(config, build_model_shape(f"{MODELS}:llama_tied"), 2)
    assert tied["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert tied["lm_head.weight"].stage == 0
    # A last layer without tensors still takes what comes after it.
    ends = ModelShape(
        {"h.0.w": (1,), "h.1.w": (1,), "head.w": (1,)}, dict.fromkeys(["h.0", "h.1", "h.2"], "")
    )
    assert layers_of_tensors(ends, layer_names(ends, 3)) == {"h.0.w": 0, "h.1.w": 1, "head.w": 2}


def test_a_conflict_of_names_is_told_and_nothing_else_is_lost(explain: Explain) -> None:
    text = explain(str(DATA / "llama_fsdp_tp.yaml"), "--model", f"{MODELS}:llama_tied", code=1)
    assert "one tensor with two specs" in text
    assert "undecided" in [line for line in text.splitlines() if line.startswith("lm_head.weight ")][-1]
    wrong = explain(
        str(DATA / "llama_fsdp_tp.yaml"),
        "--model",
        f"{MODELS}:llama",
        "sharding.model.layers.*.mlp.up_proj.weight=[fsdp]",
        code=1,
    )
    assert wrong.count("has 1 entries") == 1 and "(and 3 more layers)" in wrong
    query = [line for line in text.splitlines() if line.startswith("model.layers.0-3.self_attn.q_proj")][-1]
    assert query.split()[3:] == ["[tensor,", "fsdp]", "by", "rule", "[8,", "8]", "0"]
    tied = explain(
        str(DATA / "libai.py"), "--world-size", "1", "--model", f"{MODELS}:llama_tied", *_ONE_STAGE
    )
    assert "tied" in next(line for line in tied.splitlines() if line.startswith("lm_head.weight "))


_ONE_STAGE = (
    "train.dist.pipeline_parallel_size=1",
    "train.dist.pipeline_num_layers=4",
    "train.dist.custom_pipeline_stage_id=null",
)


def test_layers_of_several_lists() -> None:
    names = [
        "shared.weight",
        "enc.block.0.w",
        "enc.block.1.w",
        "enc.norm.w",
        "dec.block.0.w",
        "dec.block.1.w",
        "head.w",
    ]
    model = ModelShape(dict.fromkeys(names, (1,)))
    layers = layer_names(model, 4)
    assert layers == ("enc.block.0", "enc.block.1", "dec.block.0", "dec.block.1")
    assert list(layers_of_tensors(model, layers).values()) == [0, 0, 1, 1, 2, 3, 3]
    assert layer_names(model, 2) == ("enc.block.0", "enc.block.1")
    deep = ModelShape({f"layers.{i}.blocks.{j}.w": (1,) for i in range(2) for j in range(3)})
    assert len(layer_names(deep, 6)) == 6 and layer_names(deep, None) == ("layers.0", "layers.1")
    plan = load_plan(
        {"train": {"dist": {"pipeline_parallel_size": 2, "pipeline_num_layers": 5}}}, world_size=2
    )
    problems = place_model(plan, deep).problems
    assert len(problems) == 1 and "for 5 layers, and no lists of the model have so many" in problems[0]


def test_stages_that_the_script_decides_are_not_guessed() -> None:
    plan = load_plan({"partitions": 2, "auto_partition": False, "default_partition": 0})
    placement = place_model(plan, build_model_shape(f"{MODELS}:llama"))
    assert {tensor.stage for tensor in placement.tensors} == {None}
    assert any("smp.partition" in note for note in placement.notes)


@pytest.mark.parametrize("target", DIALECTS)
@pytest.mark.parametrize("name", FILES)
def test_a_plan_in_another_systems_words_reads_back(name: str, target: str, explain: Explain) -> None:
    plan = plan_of(name)
    conversion = convert(plan, target)
    assert conversion.plan.dialect == target
    assert load_text(conversion.text, target, conversion.world_size) == conversion.plan
    # Said again in that system's own words nothing is lost any more.
    again = convert(conversion.plan, target)
    assert again.losses == ()
    assert [line for line in again.text.splitlines() if not line.startswith("#")] == [
        line for line in conversion.text.splitlines() if not line.startswith("#")
    ]
    if target == plan.dialect:
        assert conversion.losses == ()
        assert conversion.plan.topology == plan.topology
        assert conversion.plan.stages == plan.stages
    text = explain(str(DATA / name), *FILES[name], "--as", target)
    assert text.startswith(conversion.text.rstrip())
    assert all(loss.split(":")[0] in text for loss in conversion.losses)


CONFIGURATIONS: list[tuple[dict[str, Any], int | None]] = [
    (
        {
            "partitions": 2,
            "auto_partition": False,
            "default_partition": 1,
            "active_microbatches": 3,
            "fast_mode": True,
        },
        None,
    ),
    (
        {"partitions": 2, "load_partition": True, "partition_file": "p.json", "placement_strategy": "PTD"},
        None,
    ),
    ({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True, "placement_strategy": "PTD"}, 8),
    ({"partitions": 2, "horovod": True, "memory_weight": 0.5, "pipeline": "simple"}, 4),
    (
        {
            "parallel": {"pipeline": 2, "tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
            "fp16": {"mode": "apex"},
        },
        32,
    ),
    (
        {
            "parallel": {"pipeline": 2},
            "num_microbatches": 4,
            "num_model_chunks": 2,
            "partition_method": "layer",
        },
        4,
    ),
    ({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}, "gradient_handler": [{"type": "A"}]}, 4),
    ({"parallel": {}, "zero": {"level": 3}}, 2),
    ({"train": {"dist": {"device_type": "cpu"}, "zero_optimization": {"enabled": True, "stage": 2}}}, 2),
    (
        {
            "train": {
                "dist": {"pipeline_parallel_size": 4, "pipeline_num_layers": 8, "tensor_parallel_size": 2}
            }
        },
        16,
    ),
    (
        {
            "mode": "hybrid",
            "sharding_size": 2,
            "sharding_dim": 0,
            "stage_cnt": 2,
            "accum_degree": 4,
            "fuse": False,
        },
        None,
    ),
    (
        {
            "mode": "pipeline",
            "sharding_size": 1,
            "stage_cnt": 4,
            "device_mapping": {f"stage_{s}": {"shard_0": f"dtu:{s // 2}"} for s in range(4)},
        },
        None,
    ),
    (
        {
            "ici_mesh": {"data": 2, "context": 2},
            "strict": False,
            "sharding": {"a.*[1]": [["data", "fsdp"], None]},
        },
        None,
    ),
    ({"partitions": 2, "microbatches": 3, "virtual_stages": 2}, None),
    ({"partitions": 2, "ddp": False, "ddp_port": 1234}, None),
    ({"ici_mesh": {"data": 2}, "smp": {"pipeline_parallel_degree": 4, "virtual_stages": 2}}, None),
    ({"ici_mesh": {"fsdp": 2}, "smp": {"microbatches": 2, "optimize": "speed"}}, None),
    ({"ici_mesh": {"data": 2, "tensor": 2}}, None),
    ({"train": {"dist": {}, "amp": {}, "activation_checkpoint": {}}}, 1),
    (
        {
            "parallel": {"tensor": {"size": 2, "mode": "1d"}},
            "num_model_chunks": 2,
            "partition_method": "layer",
        },
        2,
    ),
]


@pytest.mark.parametrize(("config", "world_size"), CONFIGURATIONS)
def test_a_systems_own_words_lose_nothing(config: dict[str, Any], world_size: int | None) -> None:
    plan = load_plan(config, world_size=world_size)
    conversion = convert(plan, plan.dialect)
    assert conversion.losses == ()
    assert compare_plans(conversion.plan, plan) == ()
    for target in DIALECTS:
        back = convert(plan, target)
        assert convert(back.plan, target).losses == ()


def test_what_is_lost_is_told() -> None:
    plan = plan_of("colossal.py")
    losses = " ".join(convert(plan, "enflame").losses)
    assert "data size: 2; there 1" in losses and "layers are shared by 4 ranks, 2d" in losses
    assert convert(plan, "libai").losses[0].startswith("layout: rank 4 is at pipeline 1, data 0")
    labels = " ".join(convert(plan_of("enflame.json"), "colossal").losses)
    assert "/device:XLA_DTU:0 ... /device:XLA_DTU:38 are not said there" in labels
    rules = " ".join(convert(plan_of("llama_fsdp_tp.yaml"), "colossal").losses)
    assert "sharding rules by name: 11; there 0" in rules


def test_a_model_gives_what_a_file_leaves_open(explain: Explain) -> None:
    model = ("--model", f"{MODELS}:llama")
    text = explain(str(DATA / "sagemaker.json"), "--world-size", "8", *model, "--as", "libai")
    assert "train.dist.pipeline_num_layers = 4" in text
    assert "train.dist.custom_pipeline_stage_id = [0, 1, 2, 3]" in text
    assert "Stands in" not in text
    assert "Stands in" in explain(str(DATA / "sagemaker.json"), "--world-size", "8", "--as", "libai")
    sharding = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    plan = load_plan(sharding, world_size=2)
    shape = build_model_shape(f"{MODELS}:llama")
    written = convert(plan, "torchprime", model=check_model(plan, shape))
    here = {t.name: t.local_shape for t in check_model(plan, shape).tensors}
    there = {t.name: t.local_shape for t in check_model(written.plan, shape).tensors}
    assert here == there


def test_files_without_lines_are_named(explain: Explain) -> None:
    text = explain(str(DATA / "sagemaker.json"), "--world-size", "8")
    assert "partitions, sagemaker.json" in text
    assert "sharding_size, enflame.json" in explain(str(DATA / "enflame.json"))


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "sagemaker"])
def test_a_file_of_another_system_is_not_read_as_if_it_said_nothing(dialect: str, explain: Explain) -> None:
    words = (str(DATA / "sagemaker.json"), "--world-size", "8", "--dialect", dialect)
    text = explain(*words, code=2)
    assert "is a configuration of sagemaker, by its keys" in text
    assert f"says {dialect}: leave that out" in text


def test_libais_keys_stand_under_train(tmp_path: Path, explain: Explain) -> None:
    path = tmp_path / "dist.yaml"
    path.write_text("dist: {tensor_parallel_size: 2}\n")
    text = explain(str(path), "--world-size", "2", "--dialect", "libai", code=2)
    assert "dist.yaml has no key 'train'" in text and "it has 'dist'" in text


def test_who_brings_a_batch_is_not_lost() -> None:
    """SMP's ranks that share a layer have batches of their own if nothing is said; others' share one."""
    shared = load_plan({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, world_size=2)
    assert '"prescaled_batch": true' in convert(shared, "sagemaker").text
    own = load_plan({"partitions": 1, "tensor_parallel_degree": 2, "ddp": True}, world_size=2)
    assert "prescaled_batch" not in convert(own, "sagemaker").text
    losses = convert(own, "colossal").losses
    assert any("2 ranks (each its own batch)" in loss for loss in losses)
    prescaled = {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    assert "2 ranks (the same batch)" in explain_plan(load_plan(prescaled, world_size=2), "x")


def test_a_model_without_a_plan_shows_the_pairs_that_will_be_split(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "libai.yaml"
    file.write_text("train: {dist: {tensor_parallel_size: 2}}\n")
    text = explain(str(file), "--world-size", "2", "--model", "tests.systems.split_models:Net")
    assert re.search(r"blocks\.0-3\.up\.weight +\[64, 16\] +\[tp, -\] +1d column +\[32, 16\]", text)
    assert re.search(r"blocks\.0-3\.down\.weight +\[16, 64\] +\[-, tp\] +1d row +\[16, 32\]", text)
    assert re.search(r"embed\.weight +\[16, 16\] +\[-, -\] +whole +\[16, 16\]", text)
