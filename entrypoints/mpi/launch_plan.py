"""A launch as data: the argument list of mpirun and the environment of the ranks.

The functions below read no environment variable and ask the machine nothing, so a plan can be
printed, compared and tested whole; `this_machine.launcher` is the part that acts.

Why these flags:

* `--bind-to none`: by default each rank is pinned to one core, which starves torch's and MPI's own
  threads, and two launches on one machine pin their ranks to the same cores.
* `--map-by :OVERSUBSCRIBE`: permission to start more ranks than there are slots; it changes nothing
  where there are enough. It is always given on one machine, because Open MPI counts physical cores
  and Python only knows hardware threads. In version 5 the older spelling `--oversubscribe` is a
  deprecated alias of it, in version 4 it is the spelling that works.
* `--map-by slot`: ranks 0 to N-1 on the first host, and so on. With the number of slots that `--host`
  gives, this is the order that placement strategies count on.
* `btl_tcp_progress_thread`: between hosts a message of more than some 64 KiB moves only when its sender
  calls MPI, which it does not while it computes; a thread of Open MPI's own moves it all the same. Two
  ranks over TCP, the sender computing for 20 ms after it began to send: 1 MiB arrives after 0.5 ms, without
  the thread after 32 ms. Set for version 5, where it has been tried.
* `python -P`: a module started by `-m` would otherwise find files of the working directory before
  the standard library. `rank_main` then sets `sys.path[0]` as the script expects it.

Variables go to the ranks of other hosts by `-x NAME`: by name, with the value in the environment of
mpirun, so that no value stands on a command line, which every user of a machine can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp_lite.config import PARAMETERS_VARIABLE
from smp_lite.smp_v1.before_script import CUDA_AS_CPU_VARIABLE

from ..container.gpus import DEVICE_VARIABLE
from ..container.job import Job
from .fabric import fabric_environment
from .options import MpiOption, export, flag, mca, merge_options, parse_options
from .rank_command import rank_command

__all__ = ["LaunchPlan", "plan_job", "plan_launch", "plan_mpirun"]


@dataclass(frozen=True)
class LaunchPlan:
    """What to start.

    argv: the whole command, mpirun first.
    environment: variables that every rank gets.
    environment_defaults: variables that every rank gets unless the user has set them.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    environment_defaults: Mapping[str, str]

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment to start with, over what was `inherited` from the user's shell."""
        return {**self.environment_defaults, **inherited, **self.environment}


def plan_launch(
    *,
    processes: int,
    script: str,
    python: str,
    mpirun: str,
    args: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    module: bool = False,
    cuda_as_cpu: bool = False,
    defaults: Mapping[str, str] | None = None,
    is_root: bool = False,
) -> LaunchPlan:
    """Plan `processes` ranks on this machine, each running `python script args...`.

    `module` says that `script` is a module name, as after `python -m`. `parameters` of None leaves
    the parameters variable to whatever the user's environment holds. With `cuda_as_cpu`, "cuda" means
    the CPU. `defaults` are variables that hold where the user has set none.

    Raises ValueError where `processes` is below 1.
    """
    target = ("-m", script) if module else (script,)
    environment = dict(_RANK_ENVIRONMENT)
    if parameters is not None:
        environment[PARAMETERS_VARIABLE] = json.dumps(parameters)
    if cuda_as_cpu:
        environment[CUDA_AS_CPU_VARIABLE] = "1"
    return plan_mpirun(
        processes=processes,
        command=rank_command(python, (*target, *args)),
        mpirun=mpirun,
        environment=environment,
        defaults=defaults,
        is_root=is_root,
    )


def plan_mpirun(
    *,
    processes: int,
    command: Sequence[str],
    mpirun: str,
    environment: Mapping[str, str],
    defaults: Mapping[str, str] | None = None,
    is_root: bool = False,
) -> LaunchPlan:
    """Plan `processes` ranks on this machine that each run `command`, one torch thread per rank.

    `defaults`: as in `plan_launch`. mpirun is that of Open MPI 5.

    Raises ValueError where `processes` is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    return LaunchPlan(
        argv=(mpirun, *_words(_one_machine(processes, mpi_major=5)), *command),
        environment={**environment, **_root_environment(is_root)},
        environment_defaults={**_RANK_DEFAULTS, **(defaults or {})},
    )


def plan_job(
    job: Job,
    *,
    processes_per_host: int,
    mpirun: str,
    mpi_version: tuple[int, int],
    python: str,
    environment: Mapping[str, str],
    script: Sequence[str],
    is_root: bool,
    agent: str | None = None,
    one_machine: bool = False,
    device: str | None = None,
) -> LaunchPlan:
    """Plan the ranks of a training job: `processes_per_host` of them on each of its hosts.

    Args:
        job: the job; its `custom_mpi_options` are merged with the options of the launch.
        processes_per_host: the number of ranks on each host.
        mpirun: path of mpirun.
        mpi_version: its (major, minor) version, of Open MPI 4 or 5.
        python: path of Python, the same on every host.
        environment: variables that must be the same for every rank. What differs between hosts, such
            as SM_CURRENT_HOST, each host gives to its own ranks.
        script: what `rank_main` runs: `train.py args...` or `-m module args...`.
        is_root: whether mpirun runs as root.
        agent: the command that starts a daemon of mpirun on another host, in the place of ssh.
        one_machine: whether all hosts of the job are played by this machine.
        device: what the ranks compute on, "cuda" or "cpu", unless the user says otherwise; None says nothing.

    Raises ValueError where a number or version is out of range, the job has several instance groups,
    or an option of the user cannot be passed on or contradicts the launch.
    """
    if processes_per_host < 1:
        raise ValueError(f"processes_per_host must be at least 1, got {processes_per_host}")
    if mpi_version[0] not in (4, 5):
        raise ValueError(f"{mpirun} is Open MPI {mpi_version[0]}; install version 4 or 5")
    groups = job.resource_config.get("instance_groups", ())
    if len(groups) > 1:
        raise ValueError(
            f"the job has {len(groups)} instance groups, and its ranks would get unlike hosts; "
            "use one instance group"
        )
    on_network = len(job.hosts) > 1 and not one_machine
    defaults = {
        **_RANK_DEFAULTS,
        **({} if device is None else {DEVICE_VARIABLE: device}),
        **fabric_environment(
            None if one_machine else job.instance_type,
            interface=job.network_interface if on_network else None,
            uses_gpus=device == "cuda",
        ),
    }
    same_everywhere = {**_RANK_ENVIRONMENT, **environment}
    num_ranks = processes_per_host * len(job.hosts)
    if on_network:
        options = _many_hosts(job, processes_per_host, mpi_version[0], agent)
    else:
        options = _one_machine(num_ranks, mpi_version[0])
    options += [export(name) for name in same_everywhere]
    options += [export(name).as_default() for name in defaults if name not in same_everywhere]
    merged = merge_options(options, parse_options(job.custom_mpi_options, mpi_version[0]))
    return LaunchPlan(
        argv=(mpirun, *_words(merged), *rank_command(python, script)),
        environment={**same_everywhere, **_root_environment(is_root)},
        environment_defaults=defaults,
    )


_RANK_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
_RANK_DEFAULTS = {"OMP_NUM_THREADS": "1"}
_NO_BINDING = flag("--bind-to", "none").as_default()


def _one_machine(num_ranks: int, mpi_major: int) -> list[MpiOption]:
    if mpi_major == 5:
        mapping = [MpiOption("--map-by", "slot", ("--map-by", ":OVERSUBSCRIBE"))]
    else:
        mapping = [flag("--map-by", "slot"), flag("--oversubscribe")]
    return [_NO_BINDING, *mapping, _num_processes(num_ranks), *_image_defaults(mpi_major)]


def _many_hosts(job: Job, processes_per_host: int, mpi_major: int, agent: str | None) -> list[MpiOption]:
    hosts = ",".join(f"{host}:{processes_per_host}" for host in job.hosts)
    num_ranks = processes_per_host * len(job.hosts)
    layout = [flag("--host", hosts), _NO_BINDING, flag("--map-by", "slot"), _num_processes(num_ranks)]
    # One interface for the data and one for the daemons; no daemon starts further ones, so that only
    # the first host needs to know how to reach the others.
    layout.append(mca("btl_tcp_if_include", job.network_interface))
    if mpi_major == 5:
        layout.append(mca("prte_if_include", job.network_interface, "--prtemca"))
        layout.append(mca("plm_ssh_no_tree_spawn", "1", "--prtemca"))
        layout.append(mca("btl_tcp_progress_thread", "1").as_default())
        reach = [mca("plm_ssh_agent", agent, "--prtemca")] if agent else []
    else:
        layout.append(mca("oob_tcp_if_include", job.network_interface))
        layout.append(mca("plm_rsh_no_tree_spawn", "1"))
        reach = [mca("plm_rsh_agent", agent)] if agent else []
    return layout + reach + _image_defaults(mpi_major)


def _image_defaults(mpi_major: int) -> list[MpiOption]:
    """What SageMaker's toolkit gives to Open MPI 4 in its images: plain TCP, no copies by the kernel
    (containers may not), and an end to all ranks when one fails. The last is version 5's nature."""
    if mpi_major == 5:
        return []
    defaults = (("pml", "ob1"), ("btl", "^openib"), ("btl_vader_single_copy_mechanism", "none"))
    return [mca("orte_abort_on_non_zero_status", "1"), *(mca(*default).as_default() for default in defaults)]


def _num_processes(num_ranks: int) -> MpiOption:
    return MpiOption("--np", str(num_ranks), ("-np", str(num_ranks)))


def _words(options: Iterable[MpiOption]) -> tuple[str, ...]:
    return tuple(word for option in options for word in option.words)


def _root_environment(is_root: bool) -> dict[str, str]:
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if is_root else {}
