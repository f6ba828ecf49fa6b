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

from .service_model import check_form

__all__ = ["check_request", "client_error", "is_job_name"]


def check_request(request: Mapping[str, Any]) -> None:
    """Raises what makes a request impossible.

    Raises:
        ParamValidationError: it lacks what it needs, or a value is of a wrong type, as in the cloud.
        ClientError: the job's name is not valid.
        ValueError: it needs what local mode has not; says which argument of the estimator that is.
    """
    check_form(request, local=True)
    name = request["TrainingJobName"]
    if not is_job_name(name):
        raise client_error("CreateTrainingJob", "ValidationException", f"job name {name!r} is not valid")
    # An entry point of ours is what runs here anyway; another one would need its image.
    command = request["AlgorithmSpecification"].get("ContainerEntrypoint")
    if command is not None and not any("smp_lite" in word for word in command):
        raise ValueError(
            f"container_entry_point={command!r} needs its image, and LocalMPISession runs none: leave it out "
            "for local runs"
        )
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


def is_job_name(name: str) -> bool:
    """Whether the service would take it."""
    return re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) is not None


def client_error(operation: str, code: str, message: str) -> ClientError:
    """An error as the service answers with."""
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)
