"""The launch in the container, rehearsed here: by its own functions, which start nothing.

What stands between a job's hyperparameters and mpirun is pure (`Job`, `plan_job`), so everything that it
would find wrong it finds before the upload. Only one thing about the container is unknown: the version of
Open MPI. An option passes if one version takes it.

What only our entry point refuses (`container.start_checks`) is checked where it will start the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_lite.config import Config, ConfigError
from smp_lite.entrypoints.container.environment import container_environment, script_arguments
from smp_lite.entrypoints.container.job import Job, decode_value
from smp_lite.entrypoints.container.start_checks import check_start
from smp_lite.entrypoints.mpi.launch_plan import plan_job

__all__ = ["rehearse_launch"]

_MPI_VERSIONS = ((5, 0), (4, 1))
"""The first one's complaint is told: it is what `pip install "smp-lite[mpi]"` brings."""


def rehearse_launch(
    hyperparameters: Mapping[str, Any],
    *,
    processes_per_host: int,
    num_hosts: int | None,
    local: bool = False,
    own_entry_point: bool = False,
) -> None:
    """Raises ConfigError where the launch of a job would fail because of its hyperparameters.

    Args:
        hyperparameters: of the job, encoded as for a request.
        processes_per_host: ranks on each host.
        num_hosts: number of hosts; None where it is not known yet.
        local: whether this machine plays all hosts.
        own_entry_point: whether smp_lite's entry point starts the job; the hyperparameters then name the
            script.
    """
    decoded = {name: decode_value(value) for name, value in hyperparameters.items()}
    hosts = [f"algo-{number}" for number in range(1, (num_hosts or 1) + 1)]
    try:
        job = Job(
            hyperparameters={k: v for k, v in decoded.items() if not k.startswith("sagemaker_")},
            framework_parameters={k: v for k, v in decoded.items() if k.startswith("sagemaker_")},
            resource_config={"hosts": hosts, "current_host": hosts[0]},
            input_data_config={},
        )
        if own_entry_point:
            check_start(job)
        _check_parameters(job, num_hosts)
        container_environment(job, num_cpus=1, num_gpus=0)
        arguments = script_arguments(job)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    complaints = []
    for version in _MPI_VERSIONS:
        try:
            plan_job(
                job,
                processes_per_host=processes_per_host,
                mpirun="mpirun",
                mpi_version=version,
                python="python",
                environment={},
                script=("train.py", *arguments),
                is_root=True,
                one_machine=local,
            )
        except ValueError as error:
            complaints.append(error)
    if len(complaints) == len(_MPI_VERSIONS):
        raise ConfigError(str(complaints[0]))


def _check_parameters(job: Job, num_hosts: int | None) -> None:
    """Raises ConfigError for parameters of model parallelism that came as a hyperparameter."""
    if job.mp_parameters is None:
        return
    config = Config.from_parameters(job.mp_parameters)
    if job.processes_per_host is not None and num_hosts is not None:
        config.check_world_size(job.processes_per_host * num_hosts)
