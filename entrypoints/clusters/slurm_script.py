"""A batch script for Slurm: `smp-lite launch --on slurm`.

Options of `sbatch` that are not written here may be given to `sbatch` itself, whose command line wins
over the script: `sbatch --account=me --cpus-per-task=8 job.sh`.

Why these lines:

* `srun --mpi=pmix`: Open MPI 5 speaks only PMIx. Under a srun that does not, its ranks come up as many
  jobs of one rank each, without an error; asked for by name, a missing PMIx is an error of srun.
* `--kill-on-bad-exit=1`: Slurm's own default lets the other ranks wait for the one that has failed.
* MASTER_ADDR and MASTER_PORT: where ranks meet on a Slurm without PMIx (`srun --mpi=none`, the ranks then
  being Slurm's). MPI does not look at them. Ports from 20000 are neither reserved nor handed out to
  clients by Linux (from 32768), and two jobs that share a node differ in their ids.
* `--gpus-per-node`, and not `--gpus-per-task`: under that, each rank sees one GPU alone, called 0, while
  ranks choose theirs by their number on the host; and a GPU that is hidden cannot be reached directly.
* SMP_LITE_DEVICE: what the runtime computes on, unless it was set where `sbatch` was called.
* `--signal`: Slurm tells the ranks that time runs out, and `smp.should_stop()` tells the script. Before
  `smp.init` that signal kills, so there is none in jobs so short that it could come that early.
"""

from __future__ import annotations

import re
import shlex

from smp_lite.config import PARAMETERS_VARIABLE

from .cluster_job import ClusterJob

__all__ = ["slurm_script"]

_NOTICE_S = 120
"""How long before its time limit a job is told of it; Slurm may be up to 60 s early."""
_SHORT_S = 600
"""Jobs that may run no longer than this get no notice."""
_WORD = re.compile(r"[\w.,@+-]+", re.ASCII)


def slurm_script(job: ClusterJob, *, partition: str | None = None) -> str:
    """The text of a script for `sbatch`; `partition` of None takes the cluster's default partition.

    Raises ValueError for a name or a partition that does not fit into a line of options.
    """
    options = {
        "job-name": _word("name", job.name),
        "nodes": job.hosts,
        "ntasks-per-node": job.processes_per_host,
    }
    if job.gpus_per_host:
        options["gpus-per-node"] = job.gpus_per_host
    if partition is not None:
        options["partition"] = _word("partition", partition)
    if job.time_limit_s is not None:
        options["time"] = str(job.time_limit)
        if job.time_limit_s > _SHORT_S:
            options["signal"] = f"USR1@{_NOTICE_S}"
    exports = ["export PYTHONUNBUFFERED=1"]
    exports += [f'export {name}="${{{name}:-{value}}}"' for name, value in job.gpu_environment.items()]
    if job.parameters_json is not None:
        exports.append(f"export {PARAMETERS_VARIABLE}={shlex.quote(job.parameters_json)}")
    lines = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items())
    return _TEMPLATE.format(options=lines, exports="\n".join(exports), command=shlex.join(job.command))


def _word(what: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(f"{what} {value!r}: Slurm takes letters, digits and any of . , @ + - _ here")
    return value


_TEMPLATE = """\
#!/bin/bash
{options}
set -euo pipefail

{exports}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"

# Where the ranks meet if Slurm starts them without PMIx; MPI does not need it.
nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${{nodes%%$'\\n'*}}"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"

# `srun --mpi=list` shows what this cluster has. Without pmix, try --mpi=none.
exec srun --mpi=pmix --kill-on-bad-exit=1 --label \\
  {command}
"""
