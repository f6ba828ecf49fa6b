"""The estimator's `distribution`, checked whole before anything is uploaded.

The SDK looks at `distribution` late and lightly. A misspelt key or an `enabled: "yes"` is dropped in
silence, `mpi` may be missing altogether (the job then starts one process), `partitions` may be too, and
what it does check it checks when the source is already in S3. Each of these costs a job its first ten
minutes or its result. Here every key at every level is known or refused, and what the launch would find
wrong in the container is found here, by the launch's own functions.

Texts are those of the SDK, of the era that had one: before version 2.195 it refused model parallelism
without MPI, before 2.200 parameters without `partitions`.

What is filled in is little. `pipeline_parallel_degree` alone also appears as `partitions`, the name by
which the SDK and transformers know it. A missing `processes_per_host` stays missing where the launch
takes the number of GPUs, and that number is known here; in a local job it becomes `partitions`. More ranks
than the instance type has GPUs are refused, unless the job's environment lets them share or sends them to the
processors (`entrypoints.container.gpus`).

`mpi` by itself also is a launch, and its options are checked likewise. Strategies of other libraries
(`torch_distributed`, `smdistributed.dataparallel`, ...) pass unchanged.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from smp_lite.config import Config, ConfigError, parse_parameters
from smp_lite.config.errors import complaint

from .host_gpus import HostGpus
from .rehearsal import rehearse_launch

__all__ = ["CheckedDistribution", "check_distribution", "check_parameters"]

_SMDISTRIBUTED_STRATEGIES = ("dataparallel", "modelparallel")
_MODELPARALLEL_KEYS = ("enabled", "parameters")
_MPI_KEYS = ("enabled", "processes_per_host", "custom_mpi_options")
_OTHER_STRATEGIES = (
    "torch_distributed",
    "pytorchddp",
    "pytorchxla",
    "parameter_server",
    "multi_worker_mirrored_strategy",
)
_TOP_KEYS = ("smdistributed", "mpi", "instance_groups", *_OTHER_STRATEGIES)

_MPI_BLOCK = '"mpi": {"enabled": True, "processes_per_host": 8}'


@dataclass(frozen=True)
class CheckedDistribution:
    """A distribution that the launch will not refuse.

    distribution: a copy of what was given; `parameters` are read from their file and name `partitions`.
    config: the checked parameters; None where model parallelism is off.
    processes_per_host: ranks on each host that MPI will start; None where MPI is off, or where the launch
        takes the number of GPUs and that is not known here.
    idle_gpus: what to say of GPUs that no rank will use; None where there are none, or nothing is known.
    """

    distribution: Mapping[str, Any]
    config: Config | None = None
    processes_per_host: int | None = None
    idle_gpus: str | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """How the distribution travels to the container: name to value, not yet encoded.

        Names and order are the SDK's. Empty where model parallelism is off.
        """
        if self.config is None:
            return {}
        mpi = self.distribution["mpi"]
        count = mpi.get("processes_per_host")
        return {
            "sagemaker_mpi_enabled": True,
            **({"sagemaker_mpi_num_of_processes_per_host": count} if count else {}),
            "sagemaker_mpi_custom_mpi_options": mpi.get("custom_mpi_options", ""),
            "mp_parameters": self.distribution["smdistributed"]["modelparallel"]["parameters"],
            "sagemaker_distributed_dataparallel_enabled": False,
        }


def check_distribution(
    distribution: Mapping[str, Any] | None,
    *,
    instance_count: int | None = 1,
    instance_type: str | None = None,
    gpus_per_host: int | None = None,
    local: bool = False,
    environment: Mapping[str, Any] | None = None,
) -> CheckedDistribution:
    """Checks the `distribution` of an estimator and returns it with its defaults.

    Args:
        distribution: as the SDK's estimators take it; `parameters` may be the path of a JSON file.
        instance_count: number of hosts; None where it is not known yet (a variable of a pipeline).
        instance_type: of the hosts; None where it is not known yet.
        gpus_per_host: number of GPUs of a host; None: that of the instance type, if that is known.
        local: the job runs on this machine. Its GPUs are no limit, unless the instance type is "local_gpu".
        environment: of the job's containers.

    Raises:
        ConfigError: for the first mistake, with key, value and way out.
    """
    if instance_count is not None and instance_count < 1:
        raise ConfigError(
            f"instance_count={instance_count!r} must be at least 1: give the number of hosts that the job "
            "runs on"
        )
    if distribution is None:
        return CheckedDistribution({})
    _require_dict(distribution, "distribution", 'write {"smdistributed": ..., "mpi": ...}')
    _refuse_unknown_keys(distribution, "distribution", _TOP_KEYS)
    mpi = _check_mpi(distribution)
    modelparallel = _check_modelparallel(distribution)
    gpus = HostGpus.of(instance_type, gpus_per_host, local, environment or {})
    if modelparallel is None:
        return _check_without_modelparallel(distribution, mpi, instance_count, gpus, local)
    _refuse_other_launchers(distribution)
    if not mpi.get("enabled", False):
        raise ConfigError(
            f"Cannot use Model Parallelism without MPI enabled! Got mpi={distribution.get('mpi')!r}: "
            f"add {_MPI_BLOCK} to the distribution"
        )
    parameters, config = check_parameters(modelparallel.get("parameters", {}))
    processes = _processes_per_host(mpi, config, gpus, local)
    gpus.check(processes)
    _check_world_size(config, processes, instance_count)
    settled = {
        **distribution,
        "smdistributed": {"modelparallel": {**modelparallel, "parameters": parameters}},
        "mpi": {**mpi, "processes_per_host": processes} if local else dict(mpi),
    }
    checked = CheckedDistribution(settled, config, processes, gpus.idle(processes))
    encoded = {key: json.dumps(value) for key, value in checked.hyperparameters.items()}
    rehearse_launch(encoded, processes_per_host=processes, num_hosts=instance_count, local=local)
    return checked


def _check_without_modelparallel(
    distribution: Mapping[str, Any],
    mpi: Mapping[str, Any],
    instance_count: int | None,
    gpus: HostGpus,
    local: bool,
) -> CheckedDistribution:
    if not mpi.get("enabled", False):
        return CheckedDistribution(dict(distribution))
    processes = mpi.get("processes_per_host") or gpus.default(local)
    gpus.check(processes or 1)
    options = {"sagemaker_mpi_custom_mpi_options": json.dumps(mpi.get("custom_mpi_options", ""))}
    rehearse_launch(options, processes_per_host=processes or 1, num_hosts=instance_count, local=local)
    idle = gpus.idle(processes) if processes else None
    return CheckedDistribution(dict(distribution), processes_per_host=processes, idle_gpus=idle)


def _check_modelparallel(distribution: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The block of model parallelism if it is switched on."""
    if "smdistributed" not in distribution:
        return None
    smdistributed = distribution["smdistributed"]
    if not isinstance(smdistributed, Mapping):
        way_out = 'write {"modelparallel": {"enabled": True, "parameters": {...}}}'
        text = "smdistributed strategy requires a dictionary."
        raise ConfigError(complaint(text, "smdistributed", smdistributed, way_out))
    for key in smdistributed:
        if key not in _SMDISTRIBUTED_STRATEGIES:
            raise ConfigError(
                f"Invalid smdistributed strategy provided: {key!r}. "
                f"{_hint(key, _SMDISTRIBUTED_STRATEGIES, 'Supported strategies')}"
            )
    if len(smdistributed) > 1:
        raise ConfigError(
            "Cannot use more than 1 smdistributed strategy. Got "
            f"{' and '.join(smdistributed)}: leave one of the two out"
        )
    if "modelparallel" not in smdistributed:
        return None
    block = smdistributed["modelparallel"]
    where = "smdistributed.modelparallel"
    _require_dict(block, where, 'write {"enabled": True, "parameters": {...}}')
    _refuse_unknown_keys(block, where, _MODELPARALLEL_KEYS)
    _check_enabled(block, where)
    return block if block["enabled"] else None


def _check_mpi(distribution: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `mpi` block, empty where there is none."""
    if "mpi" not in distribution:
        return {}
    block = distribution["mpi"]
    _require_dict(block, "mpi", f"write {_MPI_BLOCK}")
    _refuse_unknown_keys(block, "mpi", _MPI_KEYS)
    _check_enabled(block, "mpi")
    if "processes_per_host" in block:
        processes = block["processes_per_host"]
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
            text = "The number of processes_per_host must be a positive integer."
            way_out = "write a whole number of 1 or more, without quotes"
            raise ConfigError(complaint(text, "mpi.processes_per_host", processes, way_out))
    options = block.get("custom_mpi_options", "")
    if not isinstance(options, str):
        text = "custom_mpi_options must be a str."
        way_out = 'write the options of mpirun as on its command line, for example "--mca K V"'
        raise ConfigError(complaint(text, "mpi.custom_mpi_options", options, way_out))
    return block


def _check_enabled(block: Mapping[str, Any], where: str) -> None:
    if "enabled" not in block:
        raise ConfigError(
            f"{where}.enabled is missing, which the SDK takes for False: "
            'write "enabled": True, or False to switch it off'
        )
    if not isinstance(block["enabled"], bool):
        text = f"{where}.enabled must be a value in: [True, False]."
        way_out = "write True or False, without quotes"
        raise ConfigError(complaint(text, f"{where}.enabled", block["enabled"], way_out))


def _refuse_other_launchers(distribution: Mapping[str, Any]) -> None:
    # Switched off they are refused too: the SDK takes the image of SMP v2 where torch_distributed is named.
    for key in _OTHER_STRATEGIES:
        if key in distribution:
            raise ConfigError(
                f"smdistributed.modelparallel is launched by MPI, {key} by a launcher of its own: "
                f"leave {key} out, or set smdistributed.modelparallel.enabled to False"
            )
    if "instance_groups" in distribution:
        raise ConfigError(
            "smdistributed.modelparallel runs on hosts of one kind: leave instance_groups out, and give "
            "instance_type and instance_count"
        )


def check_parameters(given: object) -> tuple[dict[str, Any], Config]:
    """Returns the parameters as the job gets them, with `partitions` by that name, and what they mean.

    Args:
        given: a dictionary, or the path of a JSON file.

    Raises:
        ConfigError: for the first that is wrong or cannot be written as JSON.
    """
    parameters = parse_parameters(given)  # type: ignore[arg-type]  # it refuses other types itself
    config = Config.from_parameters(parameters)
    for key, value in parameters.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            way_out = "write a str, a number, True or False"
            text = f"{key} cannot be written as JSON ({error})."
            raise ConfigError(complaint(text, key, value, way_out)) from None
    return {**parameters, "partitions": config.partitions}, config


def _processes_per_host(mpi: Mapping[str, Any], config: Config, gpus: HostGpus, local: bool) -> int:
    """Ranks that the launch will start on each host."""
    if "processes_per_host" in mpi:
        return int(mpi["processes_per_host"])
    default = gpus.default()
    if default is None and local:
        return config.partitions
    if default is None:
        raise ConfigError(
            "mpi.processes_per_host is missing, and the number of GPUs of the instance type, which the "
            f"launch would take, is not known here: write it, for example {_MPI_BLOCK}"
        )
    return default


def _check_world_size(config: Config, processes_per_host: int, instance_count: int | None) -> None:
    if instance_count is None:
        return
    try:
        config.check_world_size(processes_per_host * instance_count)
    except ConfigError as error:
        raise ConfigError(
            f"mpi.processes_per_host={processes_per_host} on instance_count={instance_count}: {error}"
        ) from None


def _require_dict(value: object, name: str, way_out: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(complaint(f"{name} must be a dictionary.", name, value, way_out))


def _refuse_unknown_keys(block: Mapping[Any, Any], where: str, known: Collection[str]) -> None:
    for key in block:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in {where}: {_hint(key, known, 'the keys are')}")


def _hint(key: object, known: Collection[str], otherwise: str) -> str:
    close = difflib.get_close_matches(str(key).lower(), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise} {', '.join(known)}"
