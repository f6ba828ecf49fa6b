"""What this package's own entry point cannot start, as far as the job itself tells.

The images of AWS start jobs with a launcher of theirs, which knows more kinds of jobs than ours does. The
estimator asks here before it uploads anything, the container before it fetches the code.
"""

from __future__ import annotations

from .job import Job

__all__ = ["check_start"]

_OTHER_LAUNCHERS = (
    "sagemaker_torch_distributed_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_pytorch_xla_multi_worker_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
    "sagemaker_parameter_server_enabled",
)


def check_start(job: Job) -> None:
    """Raises ValueError for a job whose script or launcher this entry point does not have."""
    for name in _OTHER_LAUNCHERS:
        if job.framework_parameters.get(name):
            raise ValueError(
                f"{name} asks for a launcher that this entry point does not have: "
                'use "mpi" in the distribution, or another image'
            )
    if job.mp_parameters is not None and not job.mpi_enabled:
        raise ValueError(
            "mp_parameters are given, but sagemaker_mpi_enabled is not true, so the job would be one "
            'process: add "mpi": {"enabled": True, "processes_per_host": ...} to the distribution'
        )
    if job.submit_directory is None or job.program is None:
        raise ValueError(
            "hyperparameters.json names no script: sagemaker_program and sagemaker_submit_directory are "
            "missing; give the estimator an entry_point"
        )
    if not job.program.endswith(".py"):
        raise ValueError(f"the entry point {job.program!r} must be a Python file (.py): each rank runs it")
