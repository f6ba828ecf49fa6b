"""Processes that a rank starts: those that take themselves for it are told so, at once and by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launch.launching import launch, launch_plainly, left_behind, write

pytestmark = pytest.mark.timeout(300)

SPAWNS = """
import torch
import smp_lite as smp
smp.init({"partitions": 2})
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")
    print("got", len(list(loader)), flush=True)
"""
STARTS = """
import subprocess
import smp_lite as smp
smp.init({"partitions": 1 if "child" in sys.argv else 2})
if "child" not in sys.argv:
    code = "import smp_lite as smp; smp.init({'partitions': 1}); print('child of', smp.size())"
    command = [sys.executable, "-c", code]
    if "run" in sys.argv:
        command = [sys.executable, "-m", "smp_lite.cli", "run", "--processes", "1", __file__, "child"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr, flush=True)
    smp.barrier()
else:
    print("child of", smp.size())
"""


@pytest.mark.ci
def test_a_spawned_worker_that_initialises_is_told_to_guard_it(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", SPAWNS)
    began = time.monotonic()
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == 1
    assert "is no rank itself. multiprocessing imports the script again" in result.stdout + result.stderr
    assert "under if __name__ == '__main__':" in result.stdout + result.stderr
    assert time.monotonic() - began < 60  # and not at the limit of a wait
    assert left_behind(script) == []


@pytest.mark.ci
@pytest.mark.parametrize("how", ["plain", "run"])
def test_a_program_of_its_own_is_refused_or_has_ranks_of_its_own(how: str, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", STARTS)
    result = launch(tmp_path, "--processes", "2", str(script), how)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("child of 1") == (2 if how == "run" else 0)
    assert result.stdout.count("subprocess.run(..., env=") == (0 if how == "run" else 2)


@pytest.mark.slow
def test_a_rank_that_runs_another_program_in_its_place_stays_one(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "from smp_lite.comm.transports.launcher import note_joined, read_launch\n"
        "if 'again' not in sys.argv:\n"
        "    note_joined(os.environ, read_launch(os.environ))\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
        "import smp_lite as smp\nsmp.init({'partitions': 2})\nprint('rank', smp.rank())\n",
    )
    result = launch(tmp_path, "--processes", "2", str(script))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n"))[1:] == ["[0] rank 0", "[1] rank 1"]


FORKS = """
import smp_lite as smp
smp.init({"partitions": 2})
codes = []
for end in (lambda: None, lambda: sys.exit(7), lambda: [][0], sys.exit):
    if (child := os.fork()) == 0:
        end()
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
smp.barrier()
print("codes", codes, flush=True)
"""


@pytest.mark.ci
def test_forked_children_end_as_in_plain_python(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", FORKS)
    result = launch_plainly(tmp_path, str(script))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("codes [0, 7, 1, 0]") == 2
    assert left_behind(script) == []
