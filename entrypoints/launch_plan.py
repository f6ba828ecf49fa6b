"""A launch as data: the argument list of mpirun and the environment of the ranks.

The function below reads no environment variable and asks the machine nothing, so a plan can be
printed, compared and tested whole; `local.run_local` is the part that acts.

Why these flags (Open MPI 5, whose launcher is PRRTE):

* `--bind-to none`: by default each rank is pinned to one core, which starves torch's and MPI's own
  threads, and two launches on one machine pin their ranks to the same cores.
* `--map-by :OVERSUBSCRIBE`: permission to start more ranks than there are slots; it changes nothing
  where there are enough. It is always given, because PRRTE counts physical cores and Python only
  knows hardware threads. The older spelling `--oversubscribe` is a deprecated alias of it.
* `python -P`: a module started by `-m` would otherwise find files of the working directory before
  the standard library. `rank_main` then sets `sys.path[0]` as the script expects it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp_lite.config import PARAMETERS_VARIABLE

__all__ = ["LaunchPlan", "plan_launch", "plan_mpirun"]


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
    is_root: bool = False,
) -> LaunchPlan:
    """Plan `processes` ranks on this machine, each running `python script args...`.

    `module` says that `script` is a module name, as after `python -m`. `parameters` of None leaves
    the parameters variable to whatever the user's environment holds.

    Raises ValueError where `processes` is below 1.
    """
    target = ("-m", script) if module else (script,)
    environment = {"PYTHONUNBUFFERED": "1"}
    if parameters is not None:
        environment[PARAMETERS_VARIABLE] = json.dumps(parameters)
    return plan_mpirun(
        processes=processes,
        command=(python, "-P", "-m", "smp_lite.entrypoints.rank_main", *target, *args),
        mpirun=mpirun,
        environment=environment,
        is_root=is_root,
    )


def plan_mpirun(
    *,
    processes: int,
    command: Sequence[str],
    mpirun: str,
    environment: Mapping[str, str],
    is_root: bool = False,
) -> LaunchPlan:
    """Plan `processes` ranks on this machine that each run `command`, one torch thread per rank.

    Raises ValueError where `processes` is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if is_root else {}
    options = ("--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-np", str(processes))
    return LaunchPlan(
        argv=(mpirun, *options, *command),
        environment={**environment, **root},
        environment_defaults={"OMP_NUM_THREADS": "1"},
    )
