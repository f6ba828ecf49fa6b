"""torchprime's YAML: sharding specs by name, and the meshes ``ici_mesh`` and ``dcn_mesh``.

A file is either the mapping of names alone, or a configuration with the meshes and ``sharding`` (in
torchprime's own files, ``model.sharding``). An axis has the size ici x dcn, and ranks are row-major over
data, fsdp, tensor, expert, context. ``dcn_mesh`` says which part of an axis spans slices: the label of a rank
then names its slice and its chip there.

A spec has one entry for each dimension: null, an axis, or a list of axes of which the first is major.

torchprime has no pipelines. A section ``smp`` of SageMaker's parameters may say one, since the two speak of
different things: ``smp: {pipeline_parallel_degree: 2, microbatches: 4}``; its stages are the outermost axis.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

from ...config import Config
from ...config.errors import ConfigError
from ...plan.topology import Topology
from ..plan.parallel_plan import (
    DataParallel,
    Microbatches,
    ParallelPlan,
    Placement,
    Schedule,
    ShardingRule,
    TensorMode,
    group_kinds,
)
from ..plan.stage_assignment import StageRule
from ..reading.written import Written, unknown_key
from .sagemaker import SCHEDULES, partitioner_rule

__all__ = ["AXES", "compile_plan", "is_sharding_map", "parse_rule", "path_of"]

DIALECT = "torchprime"
AXES = ("data", "fsdp", "tensor", "expert", "context")
_MESHES = ("ici_mesh", "dcn_mesh")
_KEYS = (*_MESHES, "sharding", "model", "strict", "smp")
_SMP_KEYS = (
    *("partitions", "pipeline_parallel_degree", "microbatches", "pipeline", "active_microbatches"),
    *("auto_partition", "default_partition", "virtual_stages", "optimize", "memory_weight"),
)


def path_of(key: str) -> tuple[str, ...]:
    """The path of a command-line key: ``ici_mesh.fsdp``, ``strict``, ``smp.<key>`` or
    ``model.sharding.<name>``."""
    head, _, rest = key.partition(".")
    if head == "smp":
        if rest not in _SMP_KEYS:
            raise ConfigError(unknown_key(key, rest, _SMP_KEYS))
        return (head, rest)
    if head in _MESHES:
        if rest not in AXES:
            raise ConfigError(unknown_key(key, rest, AXES))
        return (head, rest)
    if key == "strict":
        return ("strict",)
    for prefix in ("model.sharding", "sharding"):
        if key.startswith(f"{prefix}."):
            return ("sharding", key.removeprefix(f"{prefix}."))
    raise ConfigError(
        f"unknown key {key!r}: keys are ici_mesh.<axis>, dcn_mesh.<axis>, model.sharding.<name>, strict and "
        "smp.<key>, for example ici_mesh.fsdp=4"
    )


def is_sharding_map(value: object) -> bool:
    """Whether a value is names with specs: every value is a list of null, str and lists."""
    if not isinstance(value, Mapping) or not value:
        return False
    specs = [spec for key, spec in value.items() if key != "strict"]
    return bool(specs) and all(
        isinstance(spec, list | tuple) and all(isinstance(e, str | list | tuple | None) for e in spec)
        for spec in specs
    )


def settle_shape(written: Written) -> None:
    """Puts the names under ``sharding``, wherever the file has them, before command-line changes."""
    tree = written.tree
    if is_sharding_map(tree):
        strict = {"strict": tree.pop("strict")} if isinstance(tree.get("strict"), bool) else {}
        written.tree = {"sharding": tree, **strict}
        return
    model = tree.get("model")
    if isinstance(model, Mapping) and "sharding" in model:
        if "sharding" in tree:
            raise ConfigError("sharding and model.sharding are two names of one thing: leave one of them out")
        tree["sharding"] = model["sharding"]
        tree["model"] = {key: value for key, value in model.items() if key != "sharding"}
    rules = tree.get("sharding")
    if isinstance(rules, Mapping) and isinstance(rules.get("strict"), bool):
        if "strict" in tree:
            raise ConfigError("strict and sharding.strict are two names of one thing: leave one of them out")
        tree["sharding"] = {key: value for key, value in rules.items() if key != "strict"}
        tree["strict"] = rules["strict"]


def parse_rule(name: str, spec: object) -> ShardingRule:
    """Returns one rule.

    Args:
        name: of tensors or of modules, which may end with ``[i]``.
        spec: one entry for each dimension.

    Raises:
        ConfigError: the name or the spec is not well formed, or names an axis twice or one that is not there.
    """
    pattern, bracket, index = name.partition("[")
    output_index: int | None = None
    if bracket:
        if not re.fullmatch(r"\d+\]", index):
            raise ConfigError(
                f"sharding name {name!r}: an index is a whole number of 0 or more in brackets at the end, "
                "as in "
                f"{pattern + '[0]'!r}"
            )
        output_index = int(index[:-1])
    if not isinstance(spec, list | tuple):
        raise ConfigError(
            f"the spec of {name!r} must be a list with one entry for each dimension, got {spec!r}"
        )
    dims = []
    for entry in spec:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, list | tuple) or (entry is not None and not axes):
            raise ConfigError(
                f"the spec of {name!r} holds {entry!r}: an entry is null, an axis or a list of axes"
            )
        dims.append(tuple(axes))
    used = [axis for axes in dims for axis in axes]
    for axis in used:
        if axis not in AXES:
            close = difflib.get_close_matches(str(axis), AXES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the axes are {', '.join(AXES)}"
            raise ConfigError(f"the spec of {name!r} names the axis {axis!r}: {hint}")
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise ConfigError(
            f"the spec of {name!r} uses the axis {twice[0]!r} twice: an axis splits one dimension of a "
            "tensor, once"
        )
    target: Literal["activation", "either"] = (
        "activation" if output_index is not None or not pattern else "either"
    )
    return ShardingRule(pattern, tuple(dims), output_index, target)


def compile_plan(written: Written, world_size: int | None) -> ParallelPlan:
    """Returns the plan of a configuration.

    Args:
        written: its keys.
        world_size: number of ranks; None: the product of the mesh.

    Raises:
        ConfigError: a key or a spec is wrong, or the mesh is not that of the ranks.
    """
    _check_keys(written)
    rules = tuple(parse_rule(str(name), spec) for name, spec in written.mapping("sharding").items())
    _check_indexes(rules)
    ici, dcn = ({axis: written.integer(mesh, axis, default=1) for axis in AXES} for mesh in _MESHES)
    pipeline = _pipeline(written)
    stages = (("pp", pipeline.partitions),) if written.has("smp") else ()
    axes = (*stages, *((axis, ici[axis] * dcn[axis]) for axis in AXES))
    num_ranks = prod(size for _, size in axes)
    largest = max(
        (pipeline.partitions, "smp"), (prod(dcn.values()), "dcn_mesh"), (prod(ici.values()), "ici_mesh")
    )
    written.limit(num_ranks, "ranks", largest[1])
    used = [axis for axis in AXES if any(axis in dims for rule in rules for dims in rule.dims)]
    if not any(written.has(mesh) for mesh in _MESHES):
        axis = used[0] if used else "data"
        raise ConfigError(
            f"the mesh is not said: write how many ranks each axis has, for example ici_mesh.{axis}="
            f"{world_size or 4}" + (f" (the rules use {', '.join(used)})" if used else "")
        )
    if world_size is not None and world_size != num_ranks:
        mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "1"
        raise ConfigError(
            f"{world_size} ranks for a mesh of {num_ranks} ({mesh}): the sizes of ici_mesh x dcn_mesh must "
            "multiply "
            f"to the number of ranks, which need not be said for this configuration"
        )
    notes = [f"the rules use {a!r}, which has size 1 here" for a in used if dict(axes)[a] == 1]
    weights = [rule for rule in rules if rule.target == "either"]
    is_sharded = any("fsdp" in dims for rule in weights for dims in rule.dims)
    others = (("strict", written.switch("strict", default=True)),)
    slices = prod(dcn.values())
    own = tuple((axis.upper(), (axis,)) for axis in AXES)
    return ParallelPlan(
        dialect=DIALECT,
        topology=Topology(axes, group_kinds(axes, (*own, ("BATCH", ("data", "fsdp"))))),
        placement=_placement(ici, dcn) if slices > 1 else Placement(),
        stages=_stages(pipeline),
        microbatches=Microbatches(pipeline.microbatches),
        schedule=Schedule(
            "sequential" if pipeline.partitions == 1 else SCHEDULES[pipeline.pipeline],
            max_in_flight=pipeline.active_microbatches,
            strict=pipeline.optimize == "memory",
        )
        if stages
        else Schedule(),
        tensor=TensorMode("rules" if rules else None),
        rules=rules,
        strict_rules=bool(others[0][1]),
        data_parallel=DataParallel("fsdp" if is_sharded else "ddp"),
        others=others,
        provenance=(
            ("axes", written.said("axes", how=", ".join(name for name, _ in axes))),
            *((("axis.pp", written.said("smp", _named_pp(written))),) if stages else ()),
            *((f"axis.{axis}", _said_axis(written, axis, ici[axis], dcn[axis])) for axis in AXES),
            ("placement", written.said("dcn_mesh", how="" if slices > 1 else "rank by rank")),
            ("stages", written.said("smp", "auto_partition", how="" if stages else "no pipeline")),
            ("microbatches", written.said("smp", "microbatches")),
            ("schedule", written.said("smp", "pipeline", how="" if stages else "no pipeline")),
            ("tensor", written.said("sharding")),
            ("rules", written.said("sharding")),
            ("data_parallel", written.said("sharding", how="the rules use fsdp" if is_sharded else "")),
            ("others.strict", written.said("strict")),
        ),
        warnings=tuple(written.warnings),
        notes=tuple(notes),
    )


def _pipeline(written: Written) -> Config:
    """What the section ``smp`` says, checked as SageMaker's parameters are."""
    written.check_keys(_SMP_KEYS, "smp")
    section = dict(written.mapping("smp"))
    try:
        return Config.from_parameters(
            section if _named_pp(written) in section else {**section, "partitions": 1}
        )
    except ConfigError as error:
        raise ConfigError(f"in the section smp: {error}") from None


def _named_pp(written: Written) -> str:
    return "partitions" if written.has("smp", "partitions") else "pipeline_parallel_degree"


def _stages(pipeline: Config) -> StageRule:
    owners = tuple(range(pipeline.partitions))
    if pipeline.partitions == 1:
        return StageRule("uniform", owners)
    if not pipeline.auto_partition:
        return StageRule("contexts", owners, default_stage=pipeline.default_partition, key="smp")
    return partitioner_rule(pipeline, "smp")


def _said_axis(written: Written, axis: str, ici: int, dcn: int) -> Any:
    if dcn > 1 and written.has("ici_mesh", axis):
        return written.said("ici_mesh", axis, how=f"{ici}, x dcn_mesh.{axis} {dcn}")
    return written.said("dcn_mesh" if dcn > 1 else "ici_mesh", axis)


def _check_keys(written: Written) -> None:
    for mesh in _MESHES:
        written.check_keys(AXES, mesh)
    for key in written.tree:
        if key in _KEYS:
            continue
        text = unknown_key(str(key), key, _KEYS, written.origin(str(key)))
        if "did you mean" in text:
            raise ConfigError(text)
        written.others.append(str(key))
    if written.get("model"):
        written.others.append("model")


def _check_indexes(rules: tuple[ShardingRule, ...]) -> None:
    seen: dict[str, ShardingRule] = {}
    for rule in rules:
        other = seen.setdefault(rule.pattern, rule)
        if other.output_index != rule.output_index:
            raise ConfigError(
                f"sharding {rule.name!r} conflicts with {other.name!r}: give one index of an output"
            )


def _placement(ici: Mapping[str, int], dcn: Mapping[str, int]) -> Placement:
    """A label for each rank of the row-major mesh: an axis counts the slices first, the chips of one then."""
    axes = tuple((axis, ici[axis] * dcn[axis]) for axis in AXES)
    mesh = Topology(axes)
    of_slices, of_chips = Topology(tuple(dcn.items())), Topology(tuple(ici.items()))
    labels, ordinals = [], []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        slice_ = of_slices.rank({axis: at[axis] // ici[axis] for axis in AXES})
        chip = of_chips.rank({axis: at[axis] % ici[axis] for axis in AXES})
        labels.append(f"slice {slice_} chip {chip}")
        ordinals.append(slice_ * of_chips.world_size + chip)
    return Placement(tuple(labels), tuple(ordinals))
