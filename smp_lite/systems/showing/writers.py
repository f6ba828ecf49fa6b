"""A plan as a configuration of each system: the nearest that can be written there.

What a system cannot say is left out here; :mod:`.conversion` finds it by reading the text again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from ...config.v1_parameters import LaterParameters
from ..dialects.libai import DIST_DEFAULTS, TRAIN_DEFAULTS
from ..dialects.sagemaker import SCHEDULES
from ..plan.model_placement import ModelPlacement
from ..plan.parallel_plan import ParallelPlan
from ..reading.flat_values import nest_values

__all__ = ["SUFFIXES", "WRITERS"]

Writer = Callable[[ParallelPlan, "ModelPlacement | None", "tuple[int, ...] | None"], str]
SUFFIXES = {
    "sagemaker": ".json",
    "enflame": ".json",
    "colossal": ".py",
    "libai": ".py",
    "torchprime": ".yaml",
}

_LETTERS = {"dp": "D", "pp": "P", "tp": "T"}
_STRATEGIES = {"DPT": "cluster", "TPD": "spread"}
_ORDER_OF_ROLES = ("dp", "pp", "tp")


def write_sagemaker(plan: ParallelPlan, model: ModelPlacement | None, layers: tuple[int, ...] | None) -> str:
    """The ``parameters`` as JSON."""
    parameters = _of_the_pipeline(plan)
    strategy = _strategy(plan)
    parameters["placement_strategy"] = _STRATEGIES.get(strategy, strategy)
    if plan.data_parallel.policy == "horovod":
        parameters["horovod"] = True
    elif plan.dp_size > 1 or plan.tp_size > 1 or plan.data_parallel.policy == "ddp":
        parameters["ddp"] = True
    if plan.tp_size > 1:
        parameters["tensor_parallel_degree"] = plan.tp_size
        if plan.dialect != "sagemaker":
            parameters["prescaled_batch"] = True  # elsewhere the ranks that share a layer share a batch
    if plan.dialect == "sagemaker":
        parameters |= {key: value for key, value in plan.others if key in LaterParameters.model_fields}
        if parameters.keys() & {"ddp_port", "ddp_dist_backend"}:
            parameters.setdefault("ddp", False)  # which must be said beside them
    return json.dumps(parameters, indent=2) + "\n"


def write_enflame(plan: ParallelPlan, model: ModelPlacement | None, layers: tuple[int, ...] | None) -> str:
    """The JSON of one replica."""
    others = dict(plan.others) if plan.dialect == "enflame" else {}
    is_shared = plan.stages.num_chunks == 1 and plan.stages.num_stages > plan.pp_size
    stage_cnt = plan.stages.num_stages if is_shared else plan.pp_size
    mode = "pipeline" if plan.tp_size == 1 else "hybrid"
    if plan.tp_size > 1 and (plan.pp_size == 1 or plan.schedule.name == "sequential"):
        mode = "sharding"
    content: dict[str, Any] = {
        "mode": others.get("mode", mode),
        "sharding_size": others.get("sharding_size", plan.tp_size),
        "sharding_dim": others.get("sharding_dim", -1),
        "stage_cnt": stage_cnt,
        "accum_degree": plan.microbatches.count,
    }
    if plan.tensor.fuse is False:
        content["fuse"] = False
    if plan.dialect == "enflame" and plan.placement.labels:
        content["device_mapping"] = {
            f"stage_{stage}": {
                f"shard_{plan.role_rank('tp', rank)}": plan.placement.labels[rank]
                for rank in range(plan.world_size)
                if plan.role_rank("pp", rank) == owner
            }
            for stage, owner in enumerate(plan.stages.owners)
        }
        if plan.topology.axes[0][0] == "tp":
            content["device_aliases"] = {label: rank for rank, label in enumerate(plan.placement.labels)}
    return json.dumps(content, indent=2) + "\n"


def write_colossal(plan: ParallelPlan, model: ModelPlacement | None, layers: tuple[int, ...] | None) -> str:
    """A Python file with ``parallel``."""
    parts = [f"    data={plan.dp_size},", f"    pipeline={plan.pp_size},"]
    mode = plan.tensor.mode
    if mode not in ("1d", "2d", "2.5d", "3d", "sequence"):
        mode = "1d" if plan.tp_size > 1 else None
    if mode is not None:
        depth = f", depth={plan.tensor.depth}" if plan.tensor.depth is not None else ""
        parts.append(f"    tensor=dict(size={plan.tp_size}, mode={mode!r}{depth}),")
    lines = ["parallel = dict(", *parts, ")", f"num_microbatches = {plan.microbatches.count}"]
    # With chunks Colossal-AI takes as many microbatches as there are ranks in a pipeline, or a multiple.
    if plan.stages.num_chunks > 1 and plan.microbatches.count % plan.pp_size == 0:
        lines.append(f"num_model_chunks = {plan.stages.num_chunks}")
    if plan.stages.kind == "uniform" and plan.stages.num_stages > 1:
        lines.append('partition_method = "layer"')
    if plan.stages.allow_empty:
        lines.append("allow_empty_stages = True")
    policy = plan.data_parallel.policy
    if policy == "handlers":
        lines.append(f"gradient_handler = {[{'type': name} for name in plan.data_parallel.handlers]}")
    if policy.startswith("zero") and (policy == "zero1" or plan.pp_size == 1):
        lines.append(f"zero = dict(level={policy[4:]})")
    if plan.dialect == "colossal":
        lines += [f"{key} = {value!r}" for key, value in nest_values(plan.others).items()]
    return "\n".join(lines) + "\n"


def write_libai(plan: ParallelPlan, model: ModelPlacement | None, layers: tuple[int, ...] | None) -> str:
    """A Python file that changes ``train``."""
    lines = ["from .common.train import train", ""]
    lines += [
        f"train.dist.data_parallel_size = {plan.dp_size}",
        f"train.dist.tensor_parallel_size = {plan.tp_size}",
        f"train.dist.pipeline_parallel_size = {plan.pp_size}",
    ]
    table = plan.stages.table if plan.stages.table is not None else None
    num_layers = plan.stages.num_layers
    if plan.stages.kind != "libai" and table is None and layers is not None and plan.pp_size > 1:
        table, num_layers = tuple(plan.stages.owners[stage] for stage in layers), len(layers)
    elif plan.stages.kind == "libai" and num_layers is None and layers is not None:
        num_layers = len(layers)
    if num_layers is None and plan.pp_size > 1:
        lines.append("# Stands in for the number of layers of your model, which --model would tell.")
        num_layers = plan.pp_size
    if num_layers is not None:
        lines.append(f"train.dist.pipeline_num_layers = {num_layers}")
    if table is not None:
        lines.append(f"train.dist.custom_pipeline_stage_id = {_runs(table)}")
    batch = plan.microbatches
    if batch.size is not None and batch.size != TRAIN_DEFAULTS["train_micro_batch_size"]:
        lines.append(f"train.train_micro_batch_size = {batch.size}")
    lines.append(f"train.num_accumulation_steps = {batch.count}")
    if plan.data_parallel.policy.startswith("zero"):
        stage = plan.data_parallel.policy[4:]
        lines.append(f"train.zero_optimization = dict(enabled=True, stage={stage})")
    if plan.dialect == "libai":
        lines += [f"{key} = {_as_list(value)!r}" for key, value in plan.others if not _is_default(key, value)]
    return "\n".join(lines) + "\n"


def write_torchprime(plan: ParallelPlan, model: ModelPlacement | None, layers: tuple[int, ...] | None) -> str:
    """A YAML file with the mesh and the rules."""
    if plan.dialect == "torchprime":
        sizes = {name: size for name, size in plan.topology.axes if name != "pp"}
    else:
        data = "fsdp" if plan.data_parallel.policy in ("fsdp", "zero3") else "data"
        sizes = {data: plan.dp_size, "tensor": plan.tp_size}
    content: dict[str, Any] = {"ici_mesh": {name: size for name, size in sizes.items() if size > 1}}
    if not content["ici_mesh"]:
        content["ici_mesh"] = {"data": 1}
    if not plan.strict_rules:
        content["strict"] = False
    if plan.dialect == "torchprime" and "pp" in dict(plan.topology.axes):
        content["smp"] = _of_the_pipeline(plan)
    content["sharding"] = {rule.name: _spec(rule.dims) for rule in plan.rules}
    if not plan.rules and model is not None and plan.topology.kinds and "tp" in dict(plan.topology.axes):
        content["sharding"] = {
            _starred(tensor.name): _spec([tuple("tensor" for _ in axes) for axes in tensor.dims])
            for tensor in model.tensors
            if any(tensor.dims)
        }
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


WRITERS: Mapping[str, Writer] = {
    "sagemaker": write_sagemaker,
    "enflame": write_enflame,
    "colossal": write_colossal,
    "libai": write_libai,
    "torchprime": write_torchprime,
}


def _of_the_pipeline(plan: ParallelPlan) -> dict[str, Any]:
    """SMP's parameters of stages and their schedule, as torchprime's section ``smp`` takes them too."""
    parameters: dict[str, Any] = {"partitions": plan.pp_size, "microbatches": plan.microbatches.count}
    pipeline = {schedule: name for name, schedule in SCHEDULES.items()}.get(plan.schedule.name, "interleaved")
    if plan.pp_size > 1 and pipeline != "interleaved":
        parameters["pipeline"] = pipeline
    if plan.schedule.strict is False:
        parameters["optimize"] = "speed"
    in_flight = plan.schedule.max_in_flight
    if in_flight is not None and in_flight != plan.pp_size + 2:
        parameters["active_microbatches"] = in_flight
    stages = plan.stages
    if stages.kind == "contexts":
        parameters |= {"auto_partition": False, "default_partition": stages.default_stage}
    if stages.kind == "file":
        parameters |= {"load_partition": True, "partition_file": stages.file}
    if stages.num_chunks > 1:
        parameters["virtual_stages"] = stages.virtual_stages
    if stages.memory_weight is not None:
        usual = 0.2 if parameters.get("optimize") == "speed" else 0.8
        parameters |= {"memory_weight": stages.memory_weight} if stages.memory_weight != usual else {}
    return parameters


def _strategy(plan: ParallelPlan) -> str:
    """The letters D, P and T by the plan's axes, outermost first; others as in ``cluster``."""
    roles = [role for name, _ in plan.topology.axes for role in _LETTERS if name in plan.role_axes(role)]
    found = list(dict.fromkeys(roles))
    if len(found) < 3:
        found = [role for role in _ORDER_OF_ROLES if role not in found and role == "dp"] + found
        found += [role for role in _ORDER_OF_ROLES if role not in found]
    return "".join(_LETTERS[role] for role in found)


def _runs(table: tuple[int, ...]) -> str:
    """``[0] * 6 + [1] * 7`` for stages in order, else the list."""
    if list(table) != sorted(table) or len(table) < 8:
        return str(list(table))
    return " + ".join(f"[{stage}] * {table.count(stage)}" for stage in sorted(set(table)))


def _is_default(key: str, value: object) -> bool:
    defaults: Any = {"train": {**TRAIN_DEFAULTS, "dist": {**DIST_DEFAULTS, "device_type": "cuda"}}}
    for name in key.split("."):
        if not isinstance(defaults, Mapping) or name not in defaults:
            return False
        defaults = defaults[name]
    return bool(defaults == value)


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _spec(dims: Any) -> list[Any]:
    return [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in dims]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
