"""What ``smp-lite run`` gives a script of SMP v1, and tells one that cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import launch, write

PARAMETERS = ["--parameters", '{"partitions": 1}']


def test_variables_that_scripts_read_at_import_are_there(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "show.py",
        "import json\nprint(json.dumps({k: v for k, v in os.environ.items() if k.startswith('SM_')}))\n",
    )
    ended = launch(tmp_path, "--processes", "1", *PARAMETERS, str(script), env={"SM_MODEL_DIR": "/mine"})
    found = json.loads(ended.stdout.removeprefix("[0] "))
    assert found["SM_MODEL_DIR"] == "/mine"  # what is set stays
    assert found["SM_CHANNEL_TRAIN"] == f"{tmp_path}/data/train"
    assert found["SM_CHANNEL_TEST"] == f"{tmp_path}/data/test"
    assert found["SM_OUTPUT_DATA_DIR"] == f"{tmp_path}/output"
    assert found["SM_NUM_GPUS"] == "0"
    assert json.loads(found["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}
    assert json.loads(found["SM_HP_MP_PARAMETERS"]) == {"partitions": 1}
    assert sorted(os.listdir(tmp_path)) == ["show.py"]  # none of the folders is made


def test_gpus_are_as_many_as_ranks_where_cuda_means_the_cpu(tmp_path: Path) -> None:
    told = "os.environ['SM_NUM_GPUS'], torch.cuda.device_count(), torch.ones(1).cuda().device"
    script = write(tmp_path, "show.py", f"import torch\nprint({told})\n")
    ended = launch(tmp_path, "--processes", "2", "--cuda-as-cpu", str(script))
    assert sorted(ended.stdout.splitlines()) == ["[0] 2 2 cpu", "[1] 2 2 cpu"]


@pytest.mark.parametrize("use", ["torch.cuda.set_device(0)", "torch.ones(1).to('cuda')"])
def test_a_script_that_speaks_of_cuda_is_told_of_the_switch(tmp_path: Path, use: str) -> None:
    script = write(tmp_path, "train.py", f"import torch\n{use}\n")
    ended = launch(tmp_path, "--processes", "1", str(script))
    assert ended.returncode == 1
    assert "smp-lite run --cuda-as-cpu, or in a job SMP_LITE_CUDA_AS_CPU=1" in ended.stderr
    assert launch(tmp_path, "--processes", "1", "--cuda-as-cpu", str(script)).returncode == 0


def test_another_failure_is_not(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "raise ValueError('other')\n")
    assert "cuda" not in launch(tmp_path, "--processes", "1", str(script)).stderr


def test_an_installed_original_ends_the_launch_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "place" / "smdistributed" / "modelparallel").mkdir(parents=True)
    script = write(tmp_path, "train.py", "print('ran')\n")
    ended = launch(tmp_path, "--processes", "1", str(script), env={"PYTHONPATH": str(tmp_path / "place")})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "smdistributed.modelparallel is installed in" in ended.stderr


def test_ranks_that_another_launcher_starts_find_it_too(tmp_path: Path) -> None:
    """``python -m smp_lite.smp_v1 script``, as sbatch scripts and MPIJobs do."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, smdistributed.modelparallel as m, smdistributed.modelparallel.torch as smp\n"
        "smp.init({'partitions': 1}); print(m.__version__, sys.argv[1:], smp.size())\n"
    )
    command = [sys.executable, "-m", "smp_lite.smp_v1", str(script), "--lr", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "1.15.0 ['--lr', '1'] 1\n", ended.stderr
