"""The configuration that a job was given, if it is another system's than SageMaker's.

A launcher names it in ``SMP_LITE_CONFIG``, which wins over what the script gives to ``smp.init``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...config import PARAMETERS_VARIABLE, Config
from ...config.errors import ConfigError
from ..dialects.sagemaker import SCHEDULES
from ..plan.parallel_plan import ParallelPlan
from .detect import detect_dialect
from .loading import load_plan, read_configuration

__all__ = ["CONFIG_VARIABLE", "config_of", "given_plan", "variable_for"]

CONFIG_VARIABLE = "SMP_LITE_CONFIG"

_PIPELINES = {
    **{schedule: pipeline for pipeline, schedule in SCHEDULES.items() if schedule != "forward"},
    "sequential": "interleaved",
}


def variable_for(path: str, dialect: str | None, overrides: Sequence[str]) -> str:
    """What ``SMP_LITE_CONFIG`` holds for a file."""
    return json.dumps({"file": os.path.abspath(path), "dialect": dialect, "overrides": list(overrides)})


def given_plan(
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    world_size: int | None,
    dialect: str | None = None,
    overrides: Sequence[str] = (),
) -> tuple[ParallelPlan | None, Any]:
    """What counts: the plan of another system's configuration, or else what SMP's parameters are read from.

    Args:
        config: what the script gave.
        environ: the environment; its variables win.
        world_size: number of ranks; None: where the configuration says it.
        dialect, overrides: as of :func:`~.loading.load_plan`.

    Raises:
        ConfigError: it cannot be read, or does not fit the number of ranks.
    """
    if PARAMETERS_VARIABLE in environ:
        return None, config
    if (text := environ.get(CONFIG_VARIABLE)) is not None:
        try:
            named = json.loads(text)
            config, dialect, overrides = named["file"], named.get("dialect"), named.get("overrides", ())
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"cannot read the environment variable {CONFIG_VARIABLE} ({error}): it is {text!r}; start "
                "the script with smp-lite run --config FILE, or unset it"
            ) from None
    if config is None or (dialect is None and not overrides and _looks_like_parameters(config)):
        return None, config
    written = read_configuration(config, dialect=dialect, overrides=overrides)
    if written.dialect == "sagemaker":
        return None, written.tree
    return load_plan(config, world_size=world_size, dialect=dialect, overrides=overrides), config


def _looks_like_parameters(config: Mapping[str, Any] | str | os.PathLike[str]) -> bool:
    """Whether SMP's own reader should tell what is wrong with it, if anything is."""
    if isinstance(config, Mapping):
        keys = config
    elif isinstance(config, str) and config.endswith(".json"):
        try:
            with open(config, encoding="utf-8") as file:
                keys = json.load(file)
        except (OSError, ValueError):
            return _is_no_enflame_file(config)
    else:
        return not isinstance(config, str | os.PathLike) or not os.path.isfile(config)
    if not isinstance(keys, Mapping) or not keys:
        return True
    try:
        return detect_dialect(keys, "the dictionary") == "sagemaker"
    except ConfigError:
        return True


def _is_no_enflame_file(path: str) -> bool:
    """Enflame's files may have commas at the end of lists, which JSON has not."""
    try:
        return read_configuration(path).dialect != "enflame"
    except ConfigError:
        return True


def config_of(plan: ParallelPlan, *, has_mpi: bool) -> Config:
    """What the plan comes to in SMP's words, for the parts of the library that know these.

    Args:
        plan: of another system.
        has_mpi: whether the job was started by MPI, which then sums gradients.
    """
    places_itself = plan.pp_size == 1 or plan.stages.kind in ("partitioner", "file")
    parameters: dict[str, Any] = {
        "partitions": plan.pp_size,
        "microbatches": plan.microbatches.count,
        "pipeline": _PIPELINES.get(plan.schedule.name, "interleaved"),
        "auto_partition": places_itself,
        "default_partition": plan.stages.default_stage or 0,
    }
    if plan.stages.memory_weight is not None:
        parameters["memory_weight"] = plan.stages.memory_weight
    if places_itself and plan.pp_size > 1 and plan.stages.num_chunks > 1:
        parameters["virtual_stages"] = plan.stages.virtual_stages
    if plan.schedule.strict is not None:
        parameters["optimize"] = "memory" if plan.schedule.strict else "speed"
    if plan.schedule.max_in_flight is not None:
        parameters["active_microbatches"] = plan.schedule.max_in_flight
    if plan.world_size > plan.pp_size:
        parameters["ddp"] = True
        if has_mpi:
            parameters["ddp_dist_backend"] = "mpi"
    return Config.from_parameters(parameters)
