"""A host's part of a job, from the files in its folder to the end of the ranks.

On every host: read the job (`Job`), fetch the code, install its requirements. On the first host:
wait for the others, start one mpirun, follow it. On the others: stay until the first host is done.
Where MPI is not asked for, each host starts the script by itself.

Hosts are waited for at most `SMP_LITE_HOST_LIMIT_S` seconds (600); they find each other on port
`SMP_LITE_HOST_PORT` (7790), if they have a secret in common (`secret`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from smp_lite.config import Config

from ..container.environment import container_environment, script_arguments
from ..container.gpus import (
    check_ranks_per_host,
    count_gpus,
    gpus_for_ranks,
    idle_gpus,
    shares_gpus,
)
from ..container.job import Job
from ..container.source_code import fetch_source, install_requirements
from ..container.start_checks import check_start
from ..mpi.launch_plan import plan_job
from ..mpi.mpirun import find_daemon, find_mpirun, installed_version
from ..this_machine.ending import Ending
from ..this_machine.launcher import RemoteRanks, run_local
from .network import PORT_VARIABLE, OtherHosts
from .one_machine import HOSTS_VARIABLE, Host, MeetingPlace, write_hosts
from .remote_daemon import write_agent
from .secret import job_key, take_secret
from .worker_host import run_worker_host

__all__ = ["run_job"]

GRACE_VARIABLE = "SMP_LITE_GRACE_S"
HOST_LIMIT_VARIABLE = "SMP_LITE_HOST_LIMIT_S"
PASS_PARAMETERS_VARIABLE = "SMP_LITE_PASS_PARAMETERS"

_GRACE_S = 100.0
_PORT = 7790
_MASTER_PORT = "7777"
"""What AWS's PyTorch images tell torch.distributed."""


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a host.

    per_host: number of them.
    gpus_of_host: GPUs that the script is told of.
    device: what the ranks compute on, unless the user says otherwise; None where there is no choice.
    """

    per_host: int
    gpus_of_host: int
    device: str | None


def run_job(root: Path, meeting_place: Path | None) -> Ending:
    """Run this host's part of the job under `root`.

    Args:
        root: the job's folder, `/opt/ml` in a container.
        meeting_place: the folder in which the hosts meet if all of them are on this machine; None: they
            meet on the network.

    Raises:
        ValueError: the job or the environment is wrong.
        TimeoutError: a host did not come; names it.
    """
    secret = take_secret(os.environ)
    limit_s = _seconds(HOST_LIMIT_VARIABLE, 600.0)
    job = Job.read(root)
    on_network = meeting_place is None and len(job.hosts) > 1 and job.mpi_enabled
    key = job_key(job, secret) if on_network else None
    meeting = MeetingPlace(meeting_place, job.hosts) if meeting_place is not None else None
    try:
        check_start(job)
        ranks = _ranks(job, one_machine=meeting is not None)
        host = _prepare(job, ranks, apart=meeting is not None)
    except Exception as error:
        if meeting is not None:
            meeting.announce_failure(job.current_host, str(error))
        raise
    if not job.mpi_enabled:  # as AWS's launcher: each host runs the script for itself, and knows the others
        alone = replace(job, resource_config={**job.resource_config, "hosts": [job.current_host]})
        return _launch(alone, ranks, host.environment, one_machine=meeting is not None)
    if key is not None:
        return _run_on_network(job, ranks, host, key, limit_s)
    if meeting is not None and len(job.hosts) > 1:
        return _run_on_one_machine(job, ranks, host, meeting, limit_s)
    return _launch(job, ranks, host.environment, one_machine=meeting is not None)


def _run_on_one_machine(job: Job, ranks: _Ranks, host: Host, meeting: MeetingPlace, limit_s: float) -> Ending:
    meeting.announce(host)
    if not job.is_first_host:
        code = meeting.wait_for_outcome(limit_s)
        return Ending(code, None, f"host {job.first_host} ended with exit code {code}" if code else "")
    ending = Ending(1)
    try:
        hosts = meeting.wait_for_all(limit_s)
        file = Path(job.root) / "hosts.json"
        write_hosts(file, hosts, ranks.per_host)
        environment = {**host.environment, HOSTS_VARIABLE: str(file)}
        ending = _launch(job, ranks, environment, one_machine=True)
        return ending
    finally:
        meeting.announce_outcome(ending.exit_code)


def _run_on_network(job: Job, ranks: _Ranks, host: Host, key: bytes, limit_s: float) -> Ending:
    port = _port()
    if not job.is_first_host:
        first_rank = job.hosts.index(job.current_host) * ranks.per_host
        return run_worker_host(
            ranks=range(first_rank, first_rank + ranks.per_host),
            first_host=job.first_host,
            daemon=find_daemon(find_mpirun()),
            environment=host.environment,
            key=key,
            port=port,
            limit_s=limit_s,
            grace_s=_seconds(GRACE_VARIABLE, _GRACE_S),
        )
    others = OtherHosts(job.hosts[1:], key, port, limit_s)
    ending = Ending(1)
    try:
        with tempfile.TemporaryDirectory(prefix="smp-lite-") as directory:
            agent = write_agent(Path(directory), key, port)
            ending = _launch(job, ranks, host.environment, agent=str(agent), remote=others)
        return ending
    finally:
        others.end(ending.exit_code)


def _prepare(job: Job, ranks: _Ranks, *, apart: bool) -> Host:
    """Bring this host's code and folders into place."""
    root = Path(job.root)
    code = Path(job.code_dir)
    packages = root / "packages"
    fetch_source(str(job.submit_directory), code)
    if not (code / str(job.program)).is_file():
        raise ValueError(
            f"the entry point {job.program!r} is not in the source code {job.submit_directory!r}"
        )
    install_requirements(code, apart=packages if apart else None)
    for directory in (job.model_dir, job.output_data_dir):
        Path(directory).mkdir(parents=True, exist_ok=True)
    environment = container_environment(job, num_cpus=os.cpu_count() or 1, num_gpus=ranks.gpus_of_host)
    paths = [str(code), str(packages)] if apart else [str(code)]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    if not apart:
        environment |= {"MASTER_ADDR": job.first_host, "MASTER_PORT": _MASTER_PORT}
    return Host(job.current_host, environment, str(code), os.getpid())


def _ranks(job: Job, *, one_machine: bool) -> _Ranks:
    """Settle the ranks of this host; checks the parameters against those of all hosts.

    Raises:
        ValueError: a parameter is wrong (ConfigError), or the ranks do not fit them or the GPUs.
    """
    found = count_gpus(os.environ)
    gpus = gpus_for_ranks(job.instance_type, os.environ, one_machine=one_machine, found=found)
    gpus_of_host = gpus if one_machine else found
    device = "cuda" if gpus else "cpu" if one_machine and found else None
    if not job.mpi_enabled:
        return _Ranks(1, gpus_of_host, device)
    # As AWS's launcher counts: by the GPUs that there are, also where the ranks do not compute on them.
    processes = job.processes_per_host or gpus_of_host or 1
    where = "this machine" if one_machine else f"host {job.current_host}"
    check_ranks_per_host(processes, gpus, where=where, share=shares_gpus(os.environ))
    if job.mp_parameters is not None:
        Config.from_parameters(job.mp_parameters).check_world_size(processes * len(job.hosts))
    idle = idle_gpus(processes, gpus, where=where)
    if idle is not None and job.is_first_host:
        print(f"smp-lite: {idle}", file=sys.stderr, flush=True)
    return _Ranks(processes, gpus_of_host, device)


def _launch(
    job: Job,
    ranks: _Ranks,
    environment: Mapping[str, str],
    *,
    one_machine: bool = False,
    agent: str | None = None,
    remote: RemoteRanks | None = None,
) -> Ending:
    """Start the ranks of all hosts and stay with them."""
    mpirun = find_mpirun()
    plan = plan_job(
        job,
        processes_per_host=ranks.per_host,
        mpirun=mpirun,
        mpi_version=installed_version(mpirun),
        python=sys.executable,
        environment={},  # each host has its own, and starts its ranks with it
        script=(str(job.program), *script_arguments(job, pass_parameters=_switch(PASS_PARAMETERS_VARIABLE))),
        is_root=os.geteuid() == 0,
        agent=agent,
        one_machine=one_machine,
        device=ranks.device,
    )
    os.chdir(job.code_dir)
    return run_local(
        plan,
        ranks.per_host * (len(job.hosts) if one_machine else 1),
        {**os.environ, **environment},
        grace_s=_seconds(GRACE_VARIABLE, _GRACE_S),
        remote=remote,
    )


def _port() -> int:
    text = os.environ.get(PORT_VARIABLE, str(_PORT))
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{PORT_VARIABLE}={text!r}: it must be a port number, 1 to 65535")
    return int(text)


def _switch(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{variable}={text!r}: it must be 0 or 1")
    return text == "1"


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{variable}={text!r}: it must be a number of seconds, 0 or more")
    return value
