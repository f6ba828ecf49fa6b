"""How the ranks of a host and its GPUs go together: counted, compared, and told to the ranks.

One rank drives one GPU. So a host has as many ranks as GPUs unless the job says a number. Fewer are allowed,
and said, since the rest is paid for; more are an error unless `SMP_LITE_SHARE_GPUS=1` says that ranks share.
The estimator asks here before anything is uploaded, with what the instance type has; the container asks
again, with what is there.

Where there are GPUs the ranks get `SMP_LITE_DEVICE=cuda`, by which the runtime knows where to compute. For
whoever sets it otherwise (`cpu`), or lets "cuda" mean the processor, no GPU counts here. In a job that is
played on somebody's own machine, the instance type "local" has none either, and its ranks get "cpu" where the
machine does have some; "local_gpu" has the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_lite.smp_v1.before_script import CUDA_AS_CPU_VARIABLE

from .instance_types import gpus_of_type

__all__ = [
    "DEVICE_VARIABLE",
    "LOCAL_GPU",
    "SHARE_VARIABLE",
    "check_ranks_per_host",
    "computes_on_gpus",
    "count_gpus",
    "gpus_for_ranks",
    "idle_gpus",
    "shares_gpus",
]

DEVICE_VARIABLE = "SMP_LITE_DEVICE"
SHARE_VARIABLE = "SMP_LITE_SHARE_GPUS"
LOCAL_GPU = "local_gpu"
"""The instance type of a job on this machine that uses its GPUs."""


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs of this machine that a process with this environment could use; loads no library to ask."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len([path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    names = [name.strip() for name in visible.split(",")]
    if "-1" in names:  # which hides those behind it
        names = names[: names.index("-1")]
    return len([name for name in names if name])


def computes_on_gpus(environment: Mapping[str, Any]) -> bool:
    """Whether ranks with this environment use GPUs where there are any."""
    device = str(environment.get(DEVICE_VARIABLE, "cuda"))
    return device.startswith("cuda") and str(environment.get(CUDA_AS_CPU_VARIABLE, "0")) != "1"


def gpus_for_ranks(
    instance_type: str | None, environment: Mapping[str, str], *, one_machine: bool, found: int
) -> int:
    """How many of the GPUs `found` on this host are for its ranks.

    Args:
        instance_type: of the job; None where nobody said.
        environment: of the container.
        one_machine: whether this machine plays the hosts of the job.

    Raises:
        ValueError: the instance type promises GPUs, and none is there.
    """
    if not computes_on_gpus(environment) or (one_machine and instance_type != LOCAL_GPU):
        return 0
    promised = gpus_of_type(instance_type)
    if found == 0 and (promised is not None or instance_type == LOCAL_GPU):
        has = "takes the GPUs of this machine" if promised is None else f"has {promised}"
        local = 'or instance_type="local"' if promised is None else "or an instance type without GPUs"
        raise ValueError(
            f"instance_type={instance_type!r} {has}, and none is to be seen here (/dev/nvidia*, "
            f"CUDA_VISIBLE_DEVICES): use an image for GPUs, {local}, or set {DEVICE_VARIABLE}=cpu in the "
            "job's environment to compute on the processors all the same"
        )
    return found


def shares_gpus(environment: Mapping[str, Any]) -> bool:
    """Whether several ranks may use one GPU.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = str(environment.get(SHARE_VARIABLE, "0"))
    if text not in ("0", "1"):
        raise ValueError(f"{SHARE_VARIABLE}={text!r}: it must be 0 or 1")
    return text == "1"


def check_ranks_per_host(processes: int, gpus: int, *, where: str, share: bool) -> None:
    """Raises ValueError where `processes` ranks are more than the GPUs, and may not `share` them.

    Args:
        processes: ranks on each host.
        gpus: that the ranks may use; 0 is no limit, since there are none.
        where: what has them, such as "instance_type='ml.p3.16xlarge'".
        share: whether several ranks may use one.
    """
    if gpus and processes > gpus and not share:
        raise ValueError(
            f"mpi.processes_per_host={processes}, but {where} has {_number(gpus)}, and each rank needs one: "
            f"write {gpus} or less, or set {SHARE_VARIABLE}=1 in the job's environment for ranks that share "
            f"GPUs, or {DEVICE_VARIABLE}=cpu to compute on the processors"
        )


def idle_gpus(processes: int, gpus: int, *, where: str) -> str | None:
    """What to say of GPUs that no rank uses; None where there are none. Arguments: as of the check."""
    if processes >= gpus:
        return None
    return f"{gpus - processes} of {_number(gpus)} of {where} stay idle: mpi.processes_per_host={processes}"


def _number(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"
