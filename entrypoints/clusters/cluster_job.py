"""A training job for a cluster that has its own launcher, as data.

Slurm and Kubernetes start the processes themselves, on hosts that are chosen later. So nothing is
started here: `slurm_script` and `kubernetes_manifest` turn a `ClusterJob` into the text that the
cluster wants, and this file checks all that can be known before there is a cluster. A job that waits
an hour in a queue must not end on a typing mistake.

Ranks run `python -m mpi4py script`, not `rank_main`, whose pipes lead to a launcher on the same
machine. mpi4py ends the whole job when one rank raises or calls `sys.exit(7)`; a plain `python script`
would wait for its peers in MPI_Finalize, and they for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from smp_lite.config import Config

__all__ = ["ClusterJob", "job_name"]

_MINUTES = re.compile(r"(?P<minutes>\d+)(:(?P<seconds>\d+))?", re.ASCII)
_HOURS = re.compile(r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?", re.ASCII)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What to run, and on how much. Raises ValueError for what no launch could run.

    name: the job's name in the cluster's lists.
    hosts: number of machines (Slurm: nodes; Kubernetes: worker pods).
    processes_per_host: ranks on each of them.
    script: path of the script as the hosts see it, or a module name if `module`.
    args: arguments of the script: any text, but no NUL, and no ":" alone.
    parameters: the SMP parameters; None leaves them to what the script gives to `smp.init`.
    time_limit: longest run, in Slurm's notation ("90", "90:00", "1:30:00" and "0-1:30" are all one hour
        and a half); None for the cluster's own limit.
    gpus_per_host: GPUs to ask for on each host; 0 for a job on processors.
    share_gpus: whether more ranks than GPUs may be on a host.
    """

    name: str
    hosts: int
    processes_per_host: int
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    parameters: Mapping[str, Any] | None = None
    time_limit: str | None = None
    gpus_per_host: int = 0
    share_gpus: bool = False

    def __post_init__(self) -> None:
        for what, count in (("hosts", self.hosts), ("processes_per_host", self.processes_per_host)):
            if count < 1:
                raise ValueError(f"{what} must be at least 1, got {count}")
        self._check_gpus()
        if not self.script or self.script.startswith("-"):
            raise ValueError(
                f"script {self.script!r} would be taken for an option of python: name a file or module"
            )
        for text in (self.script, *self.args):
            _check_text(text)
        if ":" in (self.script, *self.args):
            raise ValueError(
                "an argument ':' alone cannot be passed: mpirun and srun start another program there"
            )
        if self.time_limit is not None:
            _seconds(self.time_limit)
        if self.parameters is not None:
            Config.from_parameters(self.parameters).check_world_size(self.num_ranks)

    def _check_gpus(self) -> None:
        if self.gpus_per_host < 0:
            raise ValueError(f"gpus_per_host must be 0 or more, got {self.gpus_per_host}")
        if 0 < self.gpus_per_host < self.processes_per_host and not self.share_gpus:
            raise ValueError(
                f"processes_per_host is {self.processes_per_host}, but gpus_per_host {self.gpus_per_host}, "
                "and each rank needs a GPU: ask for as many GPUs, or use --share-gpus"
            )
        if self.share_gpus and self.gpus_per_host == 0:
            raise ValueError("--share-gpus, but gpus_per_host is 0: say how many with --gpus-per-host")

    @property
    def num_ranks(self) -> int:
        """Number of processes over all hosts."""
        return self.hosts * self.processes_per_host

    @property
    def command(self) -> tuple[str, ...]:
        """What each rank runs."""
        target = ("-m", self.script) if self.module else (self.script,)
        return ("python", "-m", "smp_lite.smp_v1", *target, *self.args)

    @property
    def parameters_json(self) -> str | None:
        """The value of the parameters variable."""
        return None if self.parameters is None else json.dumps(self.parameters)

    @property
    def gpu_environment(self) -> dict[str, str]:
        """Variables that let the ranks use the GPUs; `container.gpus` says what they mean."""
        if not self.gpus_per_host:
            return {}
        return {"SMP_LITE_DEVICE": "cuda", **({"SMP_LITE_SHARE_GPUS": "1"} if self.share_gpus else {})}

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds."""
        return None if self.time_limit is None else _seconds(self.time_limit)


def job_name(script: str) -> str:
    """A name for a job that runs `script`, of characters that every cluster takes.

    "runs/Train_GPT.py" gives "train-gpt", and "2_stages.py" gives "smp-2-stages".
    """
    stem = PurePath(script).name.removesuffix(".py")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return name if name[:1].isalpha() else f"smp-{name}".rstrip("-")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL character, which no argument of a program can")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not valid UTF-8, so it cannot be written into a file") from None


def _seconds(time_limit: str) -> int:
    for form in (_MINUTES, _HOURS, _DAYS):
        if match := form.fullmatch(time_limit):
            seconds = sum(int(value) * _SECONDS[unit] for unit, value in match.groupdict("0").items())
            if seconds:
                return seconds
    raise ValueError(
        f"time limit {time_limit!r} is none: write minutes, minutes:seconds, hours:minutes:seconds, "
        "days-hours, days-hours:minutes or days-hours:minutes:seconds, and more than zero"
    )
