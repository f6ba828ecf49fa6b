"""The keyword arguments of an estimator, which the SDK takes whatever they are called.

Its classes pass on what they do not know, and the last of them drops it in silence: a job with
``max_runn=3600`` would run for a day.
"""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from smp_lite.config import ConfigError
from smp_lite.config.errors import complaint

__all__ = ["check_arguments", "check_dependencies", "check_mapping", "check_reserved"]

_OLD_NAMES = frozenset(
    {
        "image_name",
        "train_instance_count",
        "train_instance_type",
        "train_max_run",
        "train_max_wait",
        "train_use_spot_instances",
        "train_volume_kms_key",
        "train_volume_size",
    }
)
"""Of version 1 of the SDK, which version 2 still reads."""
_RESERVED = "sagemaker_"
_OF_THE_SDK = {
    "sagemaker_program": "entry_point",
    "sagemaker_submit_directory": "source_dir",
    "sagemaker_container_log_level": "container_log_level",
    "sagemaker_job_name": "job_name of fit",
    "sagemaker_region": "sagemaker_session",
}
"""Hyperparameters that it writes over, each with the argument that they come from."""
_OF_THE_LAUNCH = frozenset(
    {
        "sagemaker_instance_type",
        "sagemaker_mpi_enabled",
        "sagemaker_mpi_num_of_processes_per_host",
        "sagemaker_mpi_custom_mpi_options",
        "sagemaker_distribution_instance_groups",
        "sagemaker_parameter_server_enabled",
        "sagemaker_distributed_dataparallel_enabled",
        "sagemaker_distributed_dataparallel_custom_mpi_options",
        "sagemaker_pytorch_ddp_enabled",
        "sagemaker_pytorch_xla_multi_worker_enabled",
        "sagemaker_multi_worker_mirrored_strategy_enabled",
        "sagemaker_torch_distributed_enabled",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_s3_output",
    }
)
"""Those that a container reads."""
_BY_KIND = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_arguments(estimator_class: type, given: Mapping[str, Any]) -> None:
    """Checks the keyword arguments of a new estimator.

    Warns of a name that no class of the SDK has, and that is like none: the SDK drops it.

    Args:
        estimator_class: the class that is made.
        given: its keyword arguments.

    Raises:
        ConfigError: a name is unknown and looks like one that is not, `hyperparameters` or `environment` are
            no dictionaries, or `dependencies` no list.
    """
    known = {*_OLD_NAMES, *_names(estimator_class)}
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(name, sorted(known - _OLD_NAMES), n=1)
        if close:
            raise ConfigError(
                f"unknown argument {name!r} of {estimator_class.__name__}: did you mean {close[0]!r}? The "
                "SDK would drop it in silence"
            )
        warnings.warn(
            f"unknown argument {name!r} of {estimator_class.__name__}: the SDK has none of this name, and "
            "drops it. Leave it out",
            stacklevel=3,
        )
    check_mapping("hyperparameters", given.get("hyperparameters"), "{'epochs': 3}")
    check_mapping("environment", given.get("environment"), "{'NCCL_DEBUG': 'INFO'}")
    check_dependencies(given.get("dependencies"))


def check_mapping(name: str, value: object, example: str) -> None:
    """
    Raises:
        ConfigError: the value of this argument is neither None nor a dictionary.
    """
    if value is not None and not isinstance(value, Mapping):
        text = f"{name} must be a dictionary."
        raise ConfigError(complaint(text, name, value, f"write {name}={example}, for example"))


def check_dependencies(value: object) -> None:
    """
    Raises:
        ConfigError: the dependencies are a path by itself, whose letters the SDK would take for paths.
    """
    if isinstance(value, str | os.PathLike):
        text = "dependencies must be a list of paths."
        raise ConfigError(complaint(text, "dependencies", value, f"write dependencies=[{str(value)!r}]"))


def check_reserved(hyperparameters: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Checks the names that the service has for itself.

    Args:
        hyperparameters: of the estimator, whose script the container's own program starts.
        earlier: those of an earlier request, with what the SDK has added.

    Raises:
        ConfigError: one would vanish: the script gets none of these names, and some the SDK writes over.
    """
    for key, value in hyperparameters.items():
        if key in earlier and earlier[key] == value:
            continue
        argument = _OF_THE_SDK.get(key)
        if argument is not None:
            raise ConfigError(f"hyperparameter {key!r} is written over by the SDK: give {argument} instead")
        if str(key).startswith(_RESERVED) and key not in _OF_THE_LAUNCH:
            raise ConfigError(
                f"hyperparameter {key!r}: names that begin with {_RESERVED} are the container's own, and the "
                "script would not get it: choose another name"
            )


def _names(estimator_class: type) -> Iterable[str]:
    """What the constructors of a class and its bases take by name."""
    for base in estimator_class.__mro__:
        if "__init__" in vars(base) and base is not object:
            for parameter in inspect.signature(base.__init__).parameters.values():  # type: ignore[misc]
                if parameter.kind in _BY_KIND and parameter.name != "self":
                    yield parameter.name
