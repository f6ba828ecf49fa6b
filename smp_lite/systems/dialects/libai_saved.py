"""``config.yaml``, as LiBai saves it in ``train.output_dir``: the configuration of a job with every value
resolved, and the stage of each layer by LiBai's rule and as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...errors import SMPError
from ...storage.durable import replace_file, write_text
from ..plan.parallel_plan import ParallelPlan
from ..plan.stage_assignment import libai_counts
from ..reading.flat_values import nest_values

__all__ = ["SAVED_LISTS", "LibaiPlan", "config_tree", "config_yaml", "kept_text", "save_config"]

SAVED_LISTS = ("auto_pipeline_stage_id", "actual_pipeline_stage_id")
"""Keys of ``train.dist`` that follow from the others."""

_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class LibaiPlan(ParallelPlan):
    """A plan of LiBai's dialect.

    Attributes:
        output_dir: ``train.output_dir``; None: not said.
        rest: YAML of the keys of ``train`` that say nothing about parallelism.
    """

    output_dir: str | None = None
    rest: str = ""


def kept_text(tree: Mapping[str, Any]) -> str:
    """The YAML of a part of a configuration; what is no plain value becomes its text."""
    return yaml.safe_dump(_plain(tree), sort_keys=False)


def config_tree(plan: ParallelPlan, stages: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns what ``config.yaml`` holds.

    Args:
        plan: of the configuration.
        stages: of each layer of the model, as they are; None: as the plan says. Where that does not say how
            many layers there are, ``auto_pipeline_stage_id`` and ``actual_pipeline_stage_id`` are left out.
    """
    layers = plan.stages.num_layers if stages is None else len(stages)
    dist: dict[str, Any] = {
        "data_parallel_size": plan.dp_size,
        "tensor_parallel_size": plan.tp_size,
        "pipeline_parallel_size": plan.pp_size,
        "pipeline_num_layers": layers,
        "custom_pipeline_stage_id": None if plan.stages.table is None else list(plan.stages.table),
    }
    if layers is not None:
        counts = libai_counts(layers, plan.stages.num_stages)
        automatic = [stage for stage, count in enumerate(counts) for _ in range(count)]
        actual = list(plan.stage_of_layer(layers) if stages is None else stages)
        dist |= dict(zip(SAVED_LISTS, (automatic, actual), strict=True))
    policy = plan.data_parallel.policy
    zero = {
        "enabled": policy.startswith("zero"),
        "stage": int(policy[4:]) if policy.startswith("zero") else 1,
    }
    train = {
        "train_micro_batch_size": plan.microbatches.size,
        "global_batch_size": plan.microbatches.global_batch_size,
        "num_accumulation_steps": plan.microbatches.count,
        "zero_optimization": zero,
    }
    carried = nest_values((key, value) for key, value in plan.others if key.startswith("train."))
    carried = carried.get("train", {})
    rest = (yaml.safe_load(plan.rest) or {}) if isinstance(plan, LibaiPlan) else {}
    return {"train": {**train, **carried, **rest, "dist": {**dist, **carried.get("dist", {})}}}


def config_yaml(plan: ParallelPlan, stages: Sequence[int] | None = None) -> str:
    """Returns the text of ``config.yaml`` (:func:`config_tree`)."""
    return yaml.safe_dump(config_tree(plan, stages), sort_keys=False, default_flow_style=None)


def save_config(
    plan: ParallelPlan, folder: str | os.PathLike[str], stages: Sequence[int] | None = None
) -> Path:
    """Writes ``config.yaml`` into a folder, which is made where it is not there. An earlier one is replaced
    in one move: a reader never sees half a file.

    Args:
        plan, stages: as of :func:`config_tree`.
        folder: ``train.output_dir``.

    Raises:
        SMPError: it cannot be written; names the key, the folder and the reason.
    """
    path = Path(folder) / _FILE
    temporary = path.with_name(f".{_FILE}.{os.getpid()}")
    text = config_yaml(plan, stages)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        replace_file(path, temporary, lambda new: write_text(new, text))
    except OSError as error:
        raise SMPError(
            f"train.output_dir={str(folder)!r}: {path.absolute()} cannot be written "
            f"({error.strerror or error}): name a folder that rank 0 can write, or leave output_dir out"
        ) from error
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return value if type(value) in (type(None), bool, int, float, str) else str(value)
