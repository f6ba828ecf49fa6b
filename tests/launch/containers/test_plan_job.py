"""The argument list of a training job, given to the real mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_lite.entrypoints.container.job import Job
from smp_lite.entrypoints.mpi.launch_plan import plan_job
from smp_lite.entrypoints.mpi.mpirun import find_mpirun, installed_version, stop_mpirun
from smp_lite.errors_record import ERROR_DIR_VARIABLE

LIMIT_S = 40
SCRIPT = """\
from mpi4py import MPI
import os, sys
print(MPI.COMM_WORLD.allreduce(1), os.environ["TOKEN"], os.environ.get("NCCL_DEBUG"), sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("options", "nccl_debug"),
    [
        # The seed's own. Open MPI 5 still knows the component under this name.
        ("--mca btl_vader_single_copy_mechanism none ", None),
        # As people wrote them for Open MPI 4, whose single dash version 5 does not take.
        ("-verbose -bind-to none -map-by slot -np 2 --NCCL_DEBUG WARN -mca pml ob1 --tag-output", "WARN"),
    ],
)
def test_a_job_with_options_of_its_own_starts(tmp_path: Path, options: str, nccl_debug: str | None) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = Job(
        {},
        {"sagemaker_mpi_custom_mpi_options": options},
        {"hosts": ["algo-1"], "current_host": "algo-1"},
        {},
    )
    plan = plan_job(
        job,
        processes_per_host=2,
        mpirun=find_mpirun(),
        mpi_version=installed_version(find_mpirun()),
        python=sys.executable,
        environment={"TOKEN": "s3cret", ERROR_DIR_VARIABLE: str(tmp_path)},
        script=("train.py", "--text", "a b; $HOME", ""),
        is_root=os.geteuid() == 0,
    )
    outputs = [tmp_path / f"rank{rank}.stdout" for rank in range(2)]
    for output in outputs:  # a launcher makes named pipes here; the ranks open what they find
        output.touch()
        output.with_suffix(".stderr").touch()
    process = subprocess.Popen(
        plan.argv,
        env=plan.full_environment(os.environ),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            pids = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
            stop_mpirun(process, 5.0, pids)
    expected = f"2 s3cret {nccl_debug} ['--text', 'a b; $HOME', '']\n"
    assert (process.returncode, [output.read_text() for output in outputs]) == (0, [expected] * 2), said
