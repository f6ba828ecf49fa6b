"""Whether a CreateTrainingJob request can be run on this machine, asked before anything of it starts.

Its form is checked by the rules that the service's own client checks it by, so what is refused here
would be refused there, in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from smp_lite.entrypoints.container.gpus import LOCAL_GPU

from .metrics import check_metrics
from .service_model import check_form

__all__ = [
    "check_request",
    "client_error",
    "is_job_name",
    "without_effect",
    "wrong_channel_name",
    "wrong_checkpoint_path",
    "wrong_max_wait",
    "wrong_variable_name",
]


def check_request(request: Mapping[str, Any]) -> None:
    """Raises what makes a request impossible.

    Raises:
        ParamValidationError: it lacks what it needs, or a value is of a wrong type, as in the cloud.
        ClientError: a name or a number is not valid, in the cloud too.
        ValueError: it needs what local mode has not; says which argument of the estimator that is.
    """
    check_form(request, local=True)
    name = request["TrainingJobName"]
    if not is_job_name(name):
        raise client_error("CreateTrainingJob", "ValidationException", f"job name {name!r} is not valid")
    for wrong in (
        *(wrong_channel_name(channel["ChannelName"]) for channel in request.get("InputDataConfig", ())),
        *map(wrong_variable_name, request.get("Environment", {})),
        wrong_max_wait(
            bool(request.get("EnableManagedSpotTraining")),
            request["StoppingCondition"].get("MaxWaitTimeInSeconds"),
            request["StoppingCondition"].get("MaxRuntimeInSeconds"),
        ),
    ):
        if wrong is not None:
            raise client_error("CreateTrainingJob", "ValidationException", wrong)
    # An entry point of ours is what runs here anyway; another one would need its image.
    command = request["AlgorithmSpecification"].get("ContainerEntrypoint")
    if command is not None and not any("smp_lite" in word for word in command):
        raise ValueError(
            f"container_entry_point={command!r} needs its image, and LocalMPISession runs none: leave it out "
            "for local runs"
        )
    arguments = request["AlgorithmSpecification"].get("ContainerArguments")
    if arguments:
        raise ValueError(
            f"container_arguments={arguments!r} need the entry point of an image, and LocalMPISession runs "
            "none: leave them out for local runs; what the script is to get are hyperparameters"
        )
    if request["OutputDataConfig"].get("CompressionType", "GZIP") != "GZIP":
        raise ValueError(
            "disable_output_compression=True is not supported in local mode, where outputs are tar.gz: leave "
            "it out for local runs"
        )
    check_metrics(request["AlgorithmSpecification"].get("MetricDefinitions", ()))
    if "InstanceCount" not in request["ResourceConfig"]:
        raise ValueError(
            "instance_groups are not supported in local mode: use instance_count and instance_type"
        )
    hosts = request["ResourceConfig"]["InstanceCount"]
    if request["ResourceConfig"]["InstanceType"] == LOCAL_GPU and hosts != 1:
        raise ValueError(
            f"instance_count={hosts} with instance_type={LOCAL_GPU!r}: the GPUs of this machine are those of "
            'one host; use instance_count=1, or instance_type="local"'
        )


def wrong_channel_name(name: str) -> str | None:
    """What is wrong with the name of a channel, by the service's rules and those of folders; or None."""
    if re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", name) and name not in (".", ".."):
        return None
    return f"channel name {name!r} is not valid: use up to 64 letters, digits and . - _"


def wrong_variable_name(name: str) -> str | None:
    """What is wrong with the name of a variable of the environment, by the service's rules; or None."""
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", str(name)):
        return None
    return f"environment: {name!r} is no name for a variable: use letters, digits and _"


def wrong_checkpoint_path(s3_uri: Any, local_path: Any) -> str | None:
    """What is wrong with the places for checkpoints, of which the SDK drops the second without the first."""
    if not local_path or s3_uri:
        return None
    return (
        f"checkpoint_local_path={local_path!r} without checkpoint_s3_uri: nothing would be kept of it; say "
        "where, or leave it out"
    )


def wrong_max_wait(spot: bool, max_wait: int | None, max_run: int | None) -> str | None:
    """What is wrong with the limits of a job on spot instances, by the service's rules; or None."""
    if not spot or (max_wait is not None and (max_run is None or max_wait >= max_run)):
        return None
    return (
        f"max_wait={max_wait} with use_spot_instances=True and max_run={max_run}: max_wait is the time for "
        f"waiting and running together, so give it at least max_run"
    )


def without_effect(request: Mapping[str, Any]) -> list[str]:
    """The arguments of the estimator that change nothing in local mode, because what they speak of is not
    there."""
    resources, outputs = request["ResourceConfig"], request["OutputDataConfig"]
    algorithm = request["AlgorithmSpecification"]
    hook, profiler = (dict(request.get(name, {})) for name in ("DebugHookConfig", "ProfilerConfig"))
    profiler.pop("DisableProfiler", None)  # which nothing here is anyway
    for each in (hook, profiler):
        # The SDK sends one with every job, for the folder of its outputs.
        if each.get("S3OutputPath", outputs["S3OutputPath"]).rstrip("/") == outputs["S3OutputPath"].rstrip(
            "/"
        ):
            each.pop("S3OutputPath", None)
    found = {
        "use_spot_instances": request.get("EnableManagedSpotTraining"),
        "rules": request.get("DebugRuleConfigurations") or request.get("ProfilerRuleConfigurations"),
        "debugger_hook_config": any(hook.values()),
        "tensorboard_output_config": request.get("TensorBoardOutputConfig"),
        "subnets, security_group_ids": request.get("VpcConfig"),
        "enable_network_isolation": request.get("EnableNetworkIsolation"),
        "encrypt_inter_container_traffic": request.get("EnableInterContainerTrafficEncryption"),
        "volume_kms_key": resources.get("VolumeKmsKeyId"),
        "output_kms_key": outputs.get("KmsKeyId"),
        "keep_alive_period_in_seconds": resources.get("KeepAlivePeriodInSeconds"),
        "training_plan": resources.get("TrainingPlanArn"),
        "instance_placement_config": resources.get("InstancePlacementConfig"),
        "max_retry_attempts": request.get("RetryStrategy"),
        "enable_sagemaker_metrics": algorithm.get("EnableSageMakerMetricsTimeSeries"),
        "training_repository_access_mode": algorithm.get("TrainingImageConfig"),
        "experiment_config": request.get("ExperimentConfig"),
        "profiler_config": any(profiler.values()),
        "enable_infra_check": request.get("InfraCheckConfig", {}).get("EnableInfraCheck"),
        "enable_remote_debug": request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"),
        "enable_session_tag_chaining": request.get("SessionChainingConfig", {}).get(
            "EnableSessionTagChaining"
        ),
    }
    return [name for name, value in found.items() if value]


def is_job_name(name: str) -> bool:
    """Whether the service would take it."""
    return re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) is not None


def client_error(operation: str, code: str, message: str) -> ClientError:
    """An error as the service answers with."""
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)
