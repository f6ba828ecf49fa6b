"""LiBai's ``train.dist`` and what goes with it in ``train``.

Ranks are ordered stages, data, tensor. LiBai overwrites a wrong data-parallel size and shrinks sizes that are
too large; here both are errors, unless ``compat=libai`` is given, which does the same and warns.

``num_accumulation_steps`` counts batches from the loader, each a microbatch of ``train_micro_batch_size``
samples: global = micro x data-parallel size x accumulation steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...config.errors import ConfigError
from ...plan.topology import Topology
from ..plan.parallel_plan import (
    DataParallel,
    Microbatches,
    ParallelPlan,
    Said,
    Schedule,
    TensorMode,
    group_kinds,
)
from ..plan.stage_assignment import StageRule
from ..reading.flat_values import flatten_values
from ..reading.written import Written, unknown_key
from .libai_batches import batch_sizes, said_size
from .libai_saved import SAVED_LISTS, LibaiPlan, config_tree, kept_text

__all__ = ["DIST_DEFAULTS", "TRAIN_DEFAULTS", "compile_plan", "default_train", "path_of"]

DIALECT = "libai"
DIST_DEFAULTS: dict[str, Any] = {
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "pipeline_num_layers": None,
    "custom_pipeline_stage_id": None,
}
TRAIN_DEFAULTS: dict[str, Any] = {
    "train_micro_batch_size": 32,
    "global_batch_size": None,
    "num_accumulation_steps": None,
    "input_placement_device": "cuda",
    "rdma_enabled": True,
    "activation_checkpoint": {"enabled": False},
    "zero_optimization": {"enabled": False, "stage": 1},
    "amp": {"enabled": False},
}
_DIST_KEYS = (*DIST_DEFAULTS, "num_nodes", "num_gpus_per_node", "device_type", *SAVED_LISTS)
_DEVICES = ("cuda", "npu", "xpu", "cpu")
_KEYS = ("train", "compat")
_TRAIN_KEYS = ("dist", *TRAIN_DEFAULTS, "output_dir")
_CARRIED = ("input_placement_device", "rdma_enabled", "activation_checkpoint", "amp")
#: Keys of ``train`` that say nothing about parallelism, but look like one that does.
_UNRELATED = frozenset(
    {"test_micro_batch_size", "train_iter", "train_epoch", "train_samples", "checkpointer"}
)


def default_train() -> dict[str, Any]:
    """Returns a new tree of what LiBai has for ``train`` when nothing is said."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in TRAIN_DEFAULTS.items()}
    return {**tree, "dist": dict(DIST_DEFAULTS)}


def path_of(key: str) -> tuple[str, ...]:
    """The path of a command-line key, such as ``train.dist.tensor_parallel_size``."""
    path = tuple(key.split("."))
    if path == ("compat",):
        return path
    if path[0] != "train" or len(path) < 2:
        raise ConfigError(
            f"unknown key {key!r}: keys begin with train., such as train.dist.tensor_parallel_size"
        )
    if path[1] == "dist" and (len(path) != 3 or path[2] not in _DIST_KEYS):
        raise ConfigError(unknown_key(key, path[-1], _DIST_KEYS))
    if path[1] not in _TRAIN_KEYS:
        raise ConfigError(unknown_key(key, path[1], _TRAIN_KEYS))
    return path


def compile_plan(written: Written, world_size: int | None) -> ParallelPlan:
    """Returns the plan of a configuration.

    Args:
        written: its keys.
        world_size: number of ranks; None: from ``num_nodes`` x ``num_gpus_per_node``, or from the sizes where
            ``data_parallel_size`` is among them.

    Raises:
        ConfigError: a key is unknown or wrong, or the sizes are not those of the ranks.
    """
    rest = _check_keys(written)
    compat = written.choice("compat", options=("libai", "none"), default="none") == "libai"
    warnings = list(written.warnings)
    world_size = _world_size(written, world_size)
    pp, dp, tp, how_dp = _sizes(written, world_size, compat, warnings)
    written.limit(pp * dp * tp, "ranks", "train", "dist")
    device = written.choice("train", "dist", "device_type", options=_DEVICES, default="cuda")
    stages, said_stages = _stages(written, pp, warnings)
    micro, global_, steps = batch_sizes(
        written.optional_integer("train", "train_micro_batch_size")
        if written.has("train", "train_micro_batch_size")
        else TRAIN_DEFAULTS["train_micro_batch_size"],
        written.optional_integer("train", "global_batch_size"),
        written.optional_integer("train", "num_accumulation_steps"),
        dp,
    )
    by_steps = written.get("train", "num_accumulation_steps") is not None
    path_of_count = ("train", "num_accumulation_steps" if by_steps else "global_batch_size")
    written.limit(steps, "microbatches of a step", *path_of_count)
    axes = (("pp", pp), ("dp", dp), ("tp", tp))
    data_parallel, said_data = _data_parallel(written)
    _check_carried(written)
    carried = {key: written.get("train", key, default=TRAIN_DEFAULTS[key]) for key in _CARRIED}
    others = [("train.dist.device_type", device)]
    for key, value in carried.items():
        others += flatten_values(f"train.{key}", value)
    output_dir = _output_dir(written)
    if output_dir is not None:
        others.append(("train.output_dir", output_dir))
    dist = ("train", "dist")
    plan = LibaiPlan(
        dialect=DIALECT,
        topology=Topology(axes, group_kinds(axes)),
        stages=stages,
        microbatches=Microbatches(steps, "consume", micro, global_),
        schedule=Schedule("1f1b" if pp > 1 else "sequential"),
        tensor=TensorMode("1d" if tp > 1 else None),
        data_parallel=data_parallel,
        others=tuple(others),
        provenance=(
            ("axes", written.said("axes", how="stages, data, tensor")),
            ("axis.pp", written.said(*dist, "pipeline_parallel_size")),
            ("axis.dp", written.said(*dist, "data_parallel_size", how=how_dp, is_inferred=True)),
            ("axis.tp", written.said(*dist, "tensor_parallel_size")),
            ("placement", written.said("placement", how="rank by rank")),
            ("stages", said_stages),
            ("microbatches", written.said(*path_of_count)),
            ("microbatches.size", said_size(written, global_, dp, steps)),
            ("schedule", written.said(*dist, "pipeline_parallel_size")),
            ("tensor", written.said(*dist, "tensor_parallel_size")),
            ("rules", written.said("rules", how="none")),
            ("data_parallel", said_data),
            *((f"others.{key}", written.said(*key.split("."))) for key, _ in others),
        ),
        warnings=tuple(warnings),
        output_dir=output_dir,
        rest=kept_text(rest),
    )
    _check_saved(written, plan)
    return plan


def _check_carried(written: Written) -> None:
    """Keys that LiBai's trainer would act on: here they are told, so they must say what they seem to."""
    for key in ("amp", "activation_checkpoint"):
        written.check_keys(("enabled",), "train", key)
        written.switch("train", key, "enabled", default=False)
    written.switch("train", "rdma_enabled", default=True)
    written.choice("train", "input_placement_device", options=_DEVICES, default="cuda")


def _check_keys(written: Written) -> dict[str, Any]:
    """Returns what ``train`` holds beside keys about parallelism.

    Raises:
        ConfigError: a key is unknown, and looks like one that is not.
    """
    written.check_keys(_DIST_KEYS, "train", "dist")
    left = {}
    for key, value in written.mapping("train").items():
        if key not in _TRAIN_KEYS:
            left[key] = value
            _leave_alone(written, key, _TRAIN_KEYS, "train")
    for key in written.tree:
        if key not in _KEYS:
            _leave_alone(written, key, _KEYS)
    written.others = [name for name in dict.fromkeys(written.others) if name not in _KEYS]
    return left


def _leave_alone(written: Written, key: str, known: Iterable[str], *above: str) -> None:
    name = ".".join((*above, str(key)))
    text = unknown_key(name, key, known, written.origin(*above, key))
    if "did you mean" in text and key not in _UNRELATED:
        raise ConfigError(text)
    written.others.append(name)


def _output_dir(written: Written) -> str | None:
    path = ("train", "output_dir")
    value = written.get(*path)
    if value is not None and (not isinstance(value, str) or not value):
        written.fail("output_dir must be the path of a folder.", *path, way_out="write it as text")
    return value


def _world_size(written: Written, world_size: int | None) -> int | None:
    path = ("train", "dist")
    nodes = written.optional_integer(*path, "num_nodes")
    per_node = written.optional_integer(*path, "num_gpus_per_node")
    if nodes is None or per_node is None:
        key, count = ("num_nodes", nodes) if per_node is None else ("num_gpus_per_node", per_node)
        if world_size is not None and count is not None and world_size % count:
            text = f"{world_size} ranks are not a multiple of {count}."
            written.fail(text, *path, key, way_out=f"leave {key} out, or correct it")
        return world_size
    if world_size is not None and world_size != nodes * per_node:
        text = f"{nodes} nodes x {per_node} devices are not {world_size} ranks."
        written.fail(
            text, *path, "num_nodes", way_out="leave num_nodes and num_gpus_per_node out, or correct them"
        )
    return nodes * per_node


def _sizes(
    written: Written, world_size: int | None, compat: bool, warnings: list[str]
) -> tuple[int, int, int, str]:
    """pp, dp and tp sizes, and how dp came about if nobody said it."""
    dist = ("train", "dist")
    tp = written.integer(*dist, "tensor_parallel_size", default=1)
    pp = written.integer(*dist, "pipeline_parallel_size", default=1)
    given = written.optional_integer(*dist, "data_parallel_size")
    if given == 1 and not written.is_own(*dist, "data_parallel_size"):
        # LiBai's own common/train.py says 1, and means that the size is inferred.
        given = None
    if world_size is None:
        if given is None:
            raise ConfigError(
                "the number of ranks is not known: the data-parallel size is inferred from it; add "
                "--world-size "
                f"(world_size=), for example {2 * tp * pp}, or set train.dist.data_parallel_size"
            )
        return pp, given, tp, ""
    if compat:
        shrunk = min(tp, world_size), min(pp, world_size // min(tp, world_size))
        if shrunk != (tp, pp):
            warnings.append(
                f"compat=libai: tensor size {tp} -> {shrunk[0]}, pipeline size {pp} -> {shrunk[1]}"
            )
        tp, pp = shrunk
    if tp > world_size:
        text = f"there are only {world_size} ranks."
        written.fail(text, *dist, "tensor_parallel_size", way_out=f"use a divisor of {world_size}")
    if world_size % (tp * pp):
        near = max(tp * pp, world_size // (tp * pp) * (tp * pp))
        raise ConfigError(
            f"{world_size} ranks are not a multiple of train.dist.tensor_parallel_size {tp} x "
            f"pipeline_parallel_size {pp} = {tp * pp}: start {near} or {near + tp * pp} ranks, or change "
            "the sizes"
        )
    dp = world_size // (tp * pp)
    if given is None:
        return pp, dp, tp, f"{world_size} ranks / (tensor {tp} x pipeline {pp})"
    if given != dp:
        text = f"the data-parallel size is {dp}: {world_size} ranks / (tensor {tp} x pipeline {pp})."
        if not compat:
            way_out = f"leave it out, or start {given * tp * pp} ranks"
            written.fail(text, *dist, "data_parallel_size", way_out=way_out)
        warnings.append(f"compat=libai: data_parallel_size {given} -> {dp}")
    return pp, dp, tp, ""


def _stages(written: Written, pp: int, warnings: list[str]) -> tuple[StageRule, Said]:
    dist = ("train", "dist")
    owners = tuple(range(pp))
    key = "train.dist.pipeline_parallel_size"
    layers = written.optional_integer(*dist, "pipeline_num_layers")
    if pp > 1 and layers is None:
        text = f"pipeline_num_layers must be set when pipeline_parallel_size is {pp}."
        written.fail(text, *dist, "pipeline_num_layers", way_out="write the number of layers of the model")
    written.limit(layers or 0, "layers", *dist, "pipeline_num_layers")
    if layers is not None and layers < pp:
        text = f"{layers} layers cannot fill {pp} stages."
        written.fail(text, *dist, "pipeline_num_layers", way_out=f"use {key}={layers} or less")
    table = written.get(*dist, "custom_pipeline_stage_id")
    if table is None:
        rule = StageRule("libai", owners, num_layers=layers, key=key)
        return rule, written.said(*dist, "custom_pipeline_stage_id", how="LiBai's automatic rule")
    path = (*dist, "custom_pipeline_stage_id")
    if not isinstance(table, list | tuple):
        written.fail(
            "custom_pipeline_stage_id must be a list.", *path, way_out="write the stage of each layer"
        )
    if layers is None or len(table) != layers:
        text = f"custom_pipeline_stage_id has {len(table)} entries for pipeline_num_layers={layers}."
        written.fail(text, *path, way_out="give one stage for each layer")
    wrong = [s for s in table if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < pp]
    if wrong:
        text = f"custom_pipeline_stage_id holds {wrong[0]!r}."
        written.fail(text, *path, way_out=f"stages are 0 ... {pp - 1}, as pipeline_parallel_size is {pp}")
    unused = sorted(set(range(pp)) - set(table))
    if unused:
        text = f"custom_pipeline_stage_id leaves stage {unused[0]} without a layer."
        written.fail(text, *path, way_out="give every stage a layer, or use fewer stages")
    if list(table) != sorted(table):
        warnings.append(
            "custom_pipeline_stage_id goes back to an earlier stage: values travel back and forth"
        )
    return StageRule("table", owners, num_layers=layers, table=tuple(table), key=key), written.said(*path)


def _data_parallel(written: Written) -> tuple[DataParallel, Said]:
    path = ("train", "zero_optimization")
    written.check_keys(("enabled", "stage"), *path)
    stage = written.integer(*path, "stage", default=1)
    if stage > 3:
        written.fail("ZeRO has stages 1, 2 and 3.", *path, "stage", way_out="write one of them")
    if written.switch(*path, "enabled", default=False):
        return DataParallel(f"zero{stage}"), written.said(*path, "stage")
    return DataParallel("ddp"), written.said(*path, "enabled")


def _check_saved(written: Written, plan: ParallelPlan) -> None:
    """Raises ConfigError where a saved config.yaml was changed without the lists that follow from it."""
    resolved = config_tree(plan)["train"]["dist"]
    for key in SAVED_LISTS:
        saved = written.get("train", "dist", key)
        if saved is not None and list(saved) != resolved.get(key):
            text = (
                f"train.dist.{key} belongs to another configuration; by this one it is {resolved.get(key)}."
            )
            written.fail(text, "train", "dist", key, way_out="leave it out: it is computed")
