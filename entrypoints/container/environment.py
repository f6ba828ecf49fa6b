"""What a job tells the user's script: the `SM_*` variables and the command line.

Names, encodings and quirks are those of SageMaker's own training toolkit (sagemaker-training 5.1.4),
to the byte, because scripts and libraries read them: transformers looks into SM_FRAMEWORK_PARAMS,
ours reads SM_HP_MP_PARAMETERS. The rules: None becomes "", a text stays as it is, everything else is
compact JSON with sorted keys.

One thing differs, on purpose. The toolkit also passes `mp_parameters` on the command line, where a
script that parses its arguments strictly ends with "unrecognized arguments".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .job import Job

__all__ = ["container_environment", "script_arguments"]

#: Framework parameters that have variables of their own, or none, and are not in SM_FRAMEWORK_PARAMS.
_NOT_ADDITIONAL = frozenset(
    {
        "_tuning_objective_metric",
        "default_user_module_name",
        "sagemaker_container_log_level",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_job_name",
        "sagemaker_program",
        "sagemaker_region",
        "sagemaker_s3_output",
        "sagemaker_submit_directory",
    }
)

#: The switches of the SDK's strategies: each of them makes a job a distributed one.
_STRATEGIES = (
    "sagemaker_mpi_enabled",
    "sagemaker_parameter_server_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_pytorch_xla_multi_worker_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
    "sagemaker_torch_distributed_enabled",
)

_DEFAULT_GROUP = "homogeneousCluster"
_INFO = 20


def container_environment(job: Job, *, num_cpus: int, num_gpus: int) -> dict[str, str]:
    """The `SM_*` variables of the ranks on this host, which has `num_cpus` and `num_gpus`.

    Raises ValueError where a name or a value cannot be an environment variable.
    """
    facts = _facts(job, num_cpus, num_gpus)
    exported = {name: facts[name] for name in _EXPORTED}
    exported["hps"] = facts["hyperparameters"]
    exported["framework_params"] = facts["additional_framework_parameters"]
    exported["channels"] = sorted(facts["channel_input_dirs"])
    exported["training_env"] = facts
    exported["user_args"] = script_arguments(job, pass_parameters=True)
    if facts["topology"]:
        exported["topology"] = facts["topology"]
    exported.update((f"channel_{name}", path) for name, path in facts["channel_input_dirs"].items())
    exported.update((f"hp_{name}", value) for name, value in job.hyperparameters.items())
    return dict(_variable(name, value) for name, value in exported.items())


def script_arguments(job: Job, *, pass_parameters: bool = False) -> list[str]:
    """The hyperparameters as `--name value`, sorted by name; a name of one letter as `-n value`.

    A dictionary is written `key=value,...`, None as "", anything else as `str` writes it.
    `mp_parameters` is among them only if `pass_parameters` is true: a script that parses strictly
    (`parse_args`) fails on it, and the runtime reads it from the environment.
    """
    arguments = []
    for name, value in sorted(job.hyperparameters.items()):
        if pass_parameters or name != "mp_parameters":
            arguments += [f"--{name}" if len(name) > 1 else f"-{name}", _argument(value)]
    return arguments


_EXPORTED = (
    "hosts",
    "network_interface_name",
    "user_entry_point",
    "resource_config",
    "input_data_config",
    "output_data_dir",
    "current_host",
    "current_instance_type",
    "current_instance_group",
    "current_instance_group_hosts",
    "instance_groups",
    "instance_groups_dict",
    "distribution_instance_groups",
    "is_hetero",
    "module_name",
    "log_level",
    "framework_module",
    "input_dir",
    "input_config_dir",
    "output_dir",
    "output_intermediate_dir",
    "num_cpus",
    "num_gpus",
    "num_neurons",
    "model_dir",
    "module_dir",
)


def _facts(job: Job, num_cpus: int, num_gpus: int) -> dict[str, Any]:
    """Everything in SM_TRAINING_ENV, under its names there."""
    given = job.framework_parameters
    program = job.program
    return {
        "additional_framework_parameters": {k: v for k, v in given.items() if k not in _NOT_ADDITIONAL},
        "channel_input_dirs": {name: str(job.channel_dir(name)) for name in job.input_data_config},
        "current_host": job.current_host,
        "current_instance_type": job.resource_config.get("current_instance_type", "local"),
        "framework_module": None,
        "hosts": list(job.hosts),
        "hyperparameters": dict(job.hyperparameters),
        "input_config_dir": str(job.input_dir / "config"),
        "input_data_config": job.input_data_config,
        "input_dir": str(job.input_dir),
        # These three are about programs of other libraries, which an image of ours does not have.
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "job_name": job.job_name,
        "log_level": given.get("sagemaker_container_log_level", _INFO),
        "model_dir": str(job.model_dir),
        "module_dir": str(given.get("sagemaker_submit_directory", job.code_dir)),
        "module_name": str(program).removesuffix(".py"),
        "network_interface_name": job.network_interface,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "num_neurons": 0,
        "output_data_dir": str(job.output_data_dir),
        "output_dir": str(job.output_dir),
        "output_intermediate_dir": str(job.output_dir / "intermediate"),
        "resource_config": job.resource_config,
        "topology": job.resource_config.get("topology", []),
        "user_entry_point": program,
        **_group_facts(job),
    }


def _group_facts(job: Job) -> dict[str, Any]:
    """Which hosts belong together; a cluster of one kind of instance is one group."""
    groups = {group["instance_group_name"]: group for group in job.resource_config.get("instance_groups", [])}
    current = job.resource_config.get("current_group_name", _DEFAULT_GROUP)
    distributed = job.framework_parameters.get(
        "sagemaker_distribution_instance_groups",
        [current] if any(job.framework_parameters.get(name) for name in _STRATEGIES) else [],
    )
    if groups:
        hosts = [host for name, group in groups.items() if name in distributed for host in group["hosts"]]
    else:
        hosts = list(job.hosts)
    first = hosts[0] if hosts else job.first_host
    return {
        "current_instance_group": current,
        "current_instance_group_hosts": groups[current]["hosts"] if current in groups else [],
        "distribution_hosts": hosts,
        "distribution_instance_groups": distributed,
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "is_master": job.current_host == first,
        "master_hostname": first,
    }


def _variable(name: str, value: Any) -> tuple[str, str]:
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    variable = f"SM_{name.upper()}"
    if "=" in variable or "\0" in variable + text:
        raise ValueError(
            f"{variable!r} cannot be passed in the environment: a hyperparameter or channel may have "
            "neither '=' in its name nor a NUL character anywhere"
        )
    return variable, text


def _argument(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)
