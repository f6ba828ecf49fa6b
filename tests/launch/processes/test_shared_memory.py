"""Where the ranks of a job keep the memory that they share: Open MPI's own place is one for all jobs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.launching import HANG_S, command

SCRIPT = """
import json, os
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.sendrecv(bytes(100_000), dest=1 - comm.Get_rank())
folder = os.environ["OMPI_MCA_btl_sm_backing_directory"]
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "sm_segment" in line}
comm.Barrier()
if comm.Get_rank() == 0:
    print("found", json.dumps([folder, sorted(mapped)]))
"""


def run(directory: Path) -> tuple[str, list[str]]:
    """A job of two ranks: the folder that it was given, and the segments that its first rank has mapped."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if "_backing_directory" not in name}
    done = subprocess.run(
        command("--processes", "2", str(script)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "found " in line]
    folder, mapped = json.loads(line.partition("found ")[2])
    return folder, mapped


@pytest.mark.ci
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="Open MPI takes its session's folder")
def test_each_job_has_a_folder_of_its_own_for_shared_memory(tmp_path: Path) -> None:
    folders = set()
    for _ in range(2):
        folder, mapped = run(tmp_path)
        assert mapped and all(path.startswith(f"{folder}/") for path in mapped), mapped
        assert not Path(folder).exists()
        folders.add(folder)
    assert len(folders) == 2
