"""The torchprime dialect: meshes, specs, names against a model, and which rank holds which chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import ConfigError
from smp_lite.systems import load_plan
from smp_lite.systems.dialects.torchprime import parse_rule
from smp_lite.systems.plan.model_placement import check_model, place_model
from smp_lite.systems.plan.model_shape import ModelShape, build_model_shape
from smp_lite.systems.plan.parallel_plan import ParallelPlan
from smp_lite.systems.plan.sharding_rules import holders, local_shape, match_modules, match_tensors, matches

DATA = Path(__file__).parent / "data"


def mesh(rules: dict[str, Any] | None = None, **sizes: int) -> ParallelPlan:
    return load_plan({"ici_mesh": sizes, "sharding": rules or {}})


def named(rules: dict[str, Any], *modules: str, **shapes: tuple[int, ...]) -> tuple[ParallelPlan, ModelShape]:
    model = ModelShape({name.replace("__", "."): s for name, s in shapes.items()}, dict.fromkeys(modules, ""))
    return mesh(rules, fsdp=2, tensor=2), model


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.weight", "layers.3.weight", True),
        ("layers.*.weight", "layers.12.weight", True),
        ("layers.*.weight", "layers.norm.weight", False),
        ("layers.*", "layers.0.weight", False),
        ("layers.0.weight", "layers.0.weight", True),
        ("layers.0.weight", "layers.1.weight", False),
        ("*.fc1", "0.fc1", True),
        ("*", "fc1", False),
        ("", "", True),
        ("", "fc1", False),
    ],
)
def test_a_star_is_one_number(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_one_pattern_for_the_modules_of_a_sequential() -> None:
    rules = (parse_rule("*.fc1", ["fsdp", None]),)
    assert list(match_modules(rules, ["", "0", "0.fc1", "1", "1.fc1"])) == ["0.fc1", "1.fc1"]


def test_specs_become_axes_by_dimension() -> None:
    assert parse_rule("w", [["fsdp", "tensor"], None]).dims == (("fsdp", "tensor"), ())
    assert parse_rule("w", []).dims == ()
    rule = parse_rule("foo[0]", ["fsdp"])
    assert (rule.pattern, rule.output_index, rule.target, rule.name) == ("foo", 0, "activation", "foo[0]")
    assert parse_rule("", ["fsdp"]).target == "activation"
    assert parse_rule("fc1", ["fsdp"]).target == "either"


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("w", ["fdsp"], "names the axis 'fdsp': did you mean 'fsdp'"),
        ("w", ["pipeline"], "the axes are data, fsdp, tensor, expert, context"),
        ("w", ["fsdp", ["fsdp", "tensor"]], "uses the axis 'fsdp' twice"),
        ("w", [3], "an entry is null, an axis or a list"),
        ("w", [[]], "an entry is null, an axis or a list"),
        ("w", "fsdp", "must be a list with one entry for each dimension"),
        ("w", None, "must be a list"),
        ("foo[-1]", ["fsdp"], "a whole number of 0 or more in brackets at the end"),
        ("foo[x]", ["fsdp"], "'foo\\[0\\]'"),
        ("foo[0].bar", ["fsdp"], "in brackets at the end"),
    ],
)
def test_specs_that_are_refused(name: str, spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rule(name, spec)


def test_an_output_has_one_index() -> None:
    with pytest.raises(ConfigError, match=r"'foo\[0\]' conflicts with 'foo'"):
        mesh({"foo": ["fsdp"], "foo[0]": ["fsdp"]}, fsdp=2)
    with pytest.raises(ConfigError, match=r"'foo\[1\]' conflicts with 'foo\[0\]'"):
        mesh({"foo[0]": ["fsdp"], "foo[1]": ["fsdp"]}, fsdp=2)
    plan, model = named({"a.*[0]": ["fsdp"], "a.0": ["fsdp"]}, "a.0", "a.1")
    with pytest.raises(ConfigError, match=r"'a.0' conflicts with 'a.\*\[0\]' on the output of 'a.0'"):
        match_modules(plan.rules, model.modules)


def test_a_name_can_be_a_module_and_its_tensor_another_rule() -> None:
    plan, model = named({"fc1": ["fsdp", None], "fc1.weight": ["fsdp", None]}, "fc1", fc1__weight=(4, 4))
    assert match_tensors(plan.rules, model.tensors)["fc1.weight"].pattern == "fc1.weight"
    assert match_modules(plan.rules, model.modules)["fc1"].pattern == "fc1"


def test_a_literal_index_wins_over_a_star() -> None:
    plan, model = named(
        {"a.*.w": ["fsdp"], "a.0.w": [None], "*.b.0": ["fsdp"], "0.b.*": [None]}, a__0__w=(4,), a__1__w=(4,)
    )
    found = match_tensors(plan.rules, model.tensors)
    assert (found["a.0.w"].dims, found["a.1.w"].dims) == (((),), (("fsdp",),))
    with pytest.raises(ConfigError, match=r"both fit '0.b.0' and differ"):
        match_tensors(plan.rules, {"0.b.0": (4,)})


def test_a_spec_has_as_many_entries_as_the_tensor() -> None:
    plan, model = named({"w": ["fsdp", None]}, w=(4,))
    with pytest.raises(ConfigError, match=r"the spec of 'w' has 2 entries and w has 1 dimensions, \[4\]"):
        check_model(plan, model)


def test_an_index_is_for_outputs() -> None:
    plan, model = named({"w[0]": ["fsdp"]}, w=(4,))
    with pytest.raises(ConfigError, match=r"'w\[0\]' puts an index on 'w', which is a tensor"):
        check_model(plan, model)


def test_one_tensor_with_two_names_has_one_spec() -> None:
    shapes = {"embed.weight": (4, 4), "head.weight": (4, 4)}
    model = ModelShape(shapes, ties={"head.weight": "embed.weight"})
    differ = mesh({"embed.weight": ["fsdp", None], "head.weight": [None, "fsdp"]}, fsdp=2)
    with pytest.raises(ConfigError, match=r"'head.weight' and 'embed.weight' are one tensor with two specs"):
        check_model(differ, model)
    for rules in ({"head.weight": ["fsdp", None]}, {"embed.weight": ["fsdp", None]}):
        placed = check_model(mesh(rules, fsdp=2), model).tensors
        assert [tensor.local_shape for tensor in placed] == [(2, 4), (2, 4)]


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_names() -> None:
    rules = {"layers.*.o_proj_weight": ["fsdp"], "layers.*.o_proj.weight": ["fsdp"]}
    plan, model = named(rules, "layers.0.o_proj", layers__0__o_proj__weight=(4,))
    with pytest.raises(
        ConfigError, match=r"'layers.\*.o_proj_weight' matches nothing.*'layers.\*.o_proj.weight'"
    ):
        check_model(plan, model)
    relaxed = load_plan({"ici_mesh": {"fsdp": 2}, "strict": False, "sharding": rules})
    assert check_model(relaxed, model).problems == ()


def test_which_rank_holds_which_chunk() -> None:
    plan = mesh(data=2, fsdp=2, context=2)
    chunks = holders(plan, ((), ("fsdp",)))
    assert chunks == {(0, 0): (0, 1, 4, 5), (0, 1): (2, 3, 6, 7)}
    wide = holders(mesh(data=4, fsdp=2), (("fsdp",), ()))
    assert wide == {(0, 0): (0, 2, 4, 6), (1, 0): (1, 3, 5, 7)}


def test_the_first_axis_of_a_list_is_major() -> None:
    plan = mesh(fsdp=2, tensor=2)
    assert holders(plan, (("fsdp", "tensor"),)) == {(0,): (0,), (1,): (1,), (2,): (2,), (3,): (3,)}
    assert holders(plan, (("tensor", "fsdp"),)) == {(0,): (0,), (1,): (2,), (2,): (1,), (3,): (3,)}


def test_sizes_that_do_not_divide_leave_late_ranks_less() -> None:
    plan = mesh({"w": ["fsdp"]}, fsdp=4)
    assert [local_shape(plan, (5,), (("fsdp",),), rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]
    placement = place_model(plan, ModelShape({"w": (5,)}))
    assert any("smaller chunks: w" in note for note in placement.notes)


@pytest.mark.parametrize("name", ["llama_fsdp.yaml", "llama_fsdp_tp.yaml"])
def test_files_of_a_llama_match_its_names(name: str) -> None:
    overrides = [] if "tp" in name else ["ici_mesh.fsdp=4"]
    plan = load_plan(DATA / name, overrides=overrides)
    model = build_model_shape("tests.systems.models:llama")
    placement = check_model(plan, model)
    by_name = {tensor.name: tensor for tensor in placement.tensors}
    down = by_name["model.layers.3.mlp.down_proj.weight"]
    assert down.shape == (16, 32)
    assert down.local_shape == ((8, 16) if "tp" in name else (16, 8))
    embedding = by_name["model.embed_tokens.weight"]
    assert embedding.local_shape == (16, 16)
    assert dict(placement.outputs).keys() == {*(f"model.layers.{i}" for i in range(4)), "lm_head"}


def test_a_layer_that_returns_two_values() -> None:
    plan = load_plan(DATA / "mixtral_fsdp.yaml", overrides=["ici_mesh.fsdp=4"])
    placement = check_model(plan, build_model_shape("tests.systems.models:llama"))
    assert {rule.output_index for name, rule in placement.outputs if "layers" in name} == {0}


def test_mesh_and_groups() -> None:
    plan = load_plan(DATA / "llama_fsdp_tp.yaml")
    assert plan.topology.axes == (("data", 1), ("fsdp", 2), ("tensor", 2), ("expert", 1), ("context", 1))
    assert (plan.pp_size, plan.dp_size, plan.tp_size, plan.world_size) == (1, 2, 2, 4)
    assert plan.topology.groups("TENSOR") == ((0, 1), (2, 3))
    assert plan.data_parallel.policy == "fsdp"
    wide = mesh(data=2, fsdp=2, context=2)
    assert wide.topology.group("BATCH", 0) == (0, 2, 4, 6)
    assert wide.role_size("cp") == 2


def test_slices_are_labels_of_a_row_major_mesh() -> None:
    plan = load_plan({"ici_mesh": {"data": 2, "fsdp": 2}, "dcn_mesh": {"fsdp": 2}, "sharding": {}})
    assert plan.topology.axes[:2] == (("data", 2), ("fsdp", 4))
    # Of four fsdp ranks the first two are in slice 0: an axis counts slices first.
    assert plan.placement.labels[:4] == (
        "slice 0 chip 0",
        "slice 0 chip 1",
        "slice 1 chip 0",
        "slice 1 chip 1",
    )
    assert sorted(plan.placement.local_ordinals) == list(range(8))
    assert plan.placement.labels[4] == "slice 0 chip 2"


@pytest.mark.parametrize(
    ("config", "world_size", "overrides", "message"),
    [
        ({"w": ["fsdp"]}, 8, (), "the mesh is not said.*ici_mesh.fsdp=8"),
        ({"w": ["fsdp"]}, 8, ("ici_mesh.fsdp=4",), r"8 ranks for a mesh of 4 \(fsdp 4\)"),
        ({"ici_mesh": {"fdsp": 2}}, None, (), "unknown key 'ici_mesh.fdsp': did you mean 'fsdp'"),
        ({"ici_mesh": {"fsdp": 0}}, None, (), "ici_mesh.fsdp must be a whole number of 1 or more"),
        ({"ici_mesh": {"fsdp": 2}, "icn_mesh": {}}, None, (), "unknown key 'icn_mesh'"),
        ({"ici_mesh": {}, "sharding": {}, "model": {"sharding": {}}}, None, (), "two names of one thing"),
        ({"ici_mesh": {}, "strict": True, "sharding": {"strict": False}}, None, (), "two names of one thing"),
        ({"w": ["fsdp"]}, None, ("ici_mesh.fsdb=2",), "unknown key 'ici_mesh.fsdb'"),
        ({"w": ["fsdp"]}, None, ("mesh.fsdp=2",), "unknown key 'mesh.fsdp'"),
    ],
)
def test_errors_name_the_key(
    config: dict[str, Any], world_size: int | None, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(config, world_size=world_size, overrides=overrides)


def test_yaml_errors(tmp_path: Path) -> None:
    path = tmp_path / "sharding.yaml"
    path.write_text("*.fc1: [fsdp]\n")
    with pytest.raises(ConfigError, match="must be quoted"):
        load_plan(path)
    path.write_text("w: [fsdp]\nw: [null]\n")
    with pytest.raises(ConfigError, match="'w' stands twice"):
        load_plan(path)


def test_rules_from_the_command_line() -> None:
    plan = load_plan(
        DATA / "llama_fsdp_tp.yaml",
        overrides=[
            "model.sharding.model.norm.weight=[fsdp]",
            "model.sharding.lm_head=[fsdp, null, null]",
            "strict=false",
        ],
    )
    rules = {rule.name: rule.dims for rule in plan.rules}
    assert rules["model.norm.weight"] == (("fsdp",),)
    assert rules["lm_head"] == (("fsdp",), (), ())
    assert plan.strict_rules is False
