"""What ``smp-lite run`` gives a script of SMP v1, and tells one that cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_lite.smp_v1.before_script import job_variables, prepared_here
from tests.launch.launching import launch, write

pytestmark = pytest.mark.sampled(3)

PARAMETERS = ["--parameters", '{"partitions": 1}']


def test_variables_that_scripts_read_at_import_are_there(tmp_path: Path) -> None:
    shown = "json.dumps({k: v for k, v in os.environ.items() if k.startswith('SM_')})"
    text = f"import json\nfrom arguments import *\nos.environ['SM_MODEL_DIR']\nprint({shown})\n"
    script = write(tmp_path, "show.py", text)
    names = ("SM_OUTPUT_DATA_DIR", "SM_CHANNEL_TRAIN", "SM_CHANNEL_TEST", "SM_NUM_GPUS")
    read = "".join(f"os.environ['{name}']\n" for name in names)
    (tmp_path / "arguments.py").write_text(f"import os\n{read}")
    ended = launch(tmp_path, "--processes", "1", *PARAMETERS, str(script), env={"SM_MODEL_DIR": "/mine"})
    found = json.loads(ended.stdout.removeprefix("[0] "))
    assert found["SM_MODEL_DIR"] == "/mine"  # what is set stays
    assert found["SM_CHANNEL_TRAIN"] == f"{tmp_path}/data/train"
    assert found["SM_CHANNEL_TEST"] == f"{tmp_path}/data/test"
    assert found["SM_OUTPUT_DATA_DIR"] == f"{tmp_path}/output"
    assert found["SM_NUM_GPUS"] == "0"
    assert json.loads(found["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}
    assert json.loads(found["SM_HP_MP_PARAMETERS"]) == {"partitions": 1}
    assert "SM_HOSTS" not in found  # nobody reads it
    assert not any(path.is_dir() and path.name != "__pycache__" for path in tmp_path.iterdir())


def test_a_script_that_asks_whether_it_is_in_a_job_is_told_that_it_is_not(tmp_path: Path) -> None:
    text = "print(os.environ.get('SM_CHANNEL_TRAIN', 'here'), 'SM_MODEL_DIR' in os.environ)\n"
    script = write(tmp_path, "train.py", text)
    assert launch(tmp_path, "--processes", "1", str(script)).stdout == "[0] here False\n"


def test_what_lies_beside_a_script_and_is_no_module_does_not_count(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['SM_MODEL_DIR']\n")
    (tmp_path / ".#train.py").symlink_to("me@host.123:1")  # as an editor marks what it has open
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "secret.py").touch(mode=0)
    os.mkfifo(tmp_path / "pipe.py")
    found = job_variables(script, "/here", num_cpus=1, num_gpus=0)
    assert found.keys() == {"SM_FRAMEWORK_PARAMS", "SM_MODEL_DIR"}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "plan"])
def test_the_other_commands_ready_a_script_too_and_leave_nothing(tmp_path: Path, command: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    before = dict(os.environ)
    parameters = ["--parameters", '{"partitions": 2, "ddp": true}']
    ended = subprocess.run(
        [sys.executable, "-m", "smp_lite.cli", command, *parameters, "--cuda-as-cpu", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ("equal to the bit over 2 steps" if command == "check" else "makespan") in ended.stdout
    with prepared_here(str(script), cuda_as_cpu=False):
        assert os.environ["SM_NUM_GPUS"] == "0"
    assert dict(os.environ) == before


SMALL = """
import os
import smdistributed.modelparallel.torch as smp, torch
folder = os.environ["SM_MODEL_DIR"], os.environ["SM_NUM_GPUS"]
smp.init()
torch.cuda.set_device(smp.local_rank())
model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for i in range(3):
    loss = train_step(model, torch.ones(4, 4, device="cuda")).reduce_mean()
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    optimizer.step()
"""


@pytest.mark.slow
def test_gpus_are_as_many_as_ranks_where_cuda_means_the_cpu(tmp_path: Path) -> None:
    told = "os.environ['SM_NUM_GPUS'], torch.cuda.device_count(), torch.ones(1).cuda().device"
    script = write(tmp_path, "show.py", f"import torch\nprint({told})\n")
    ended = launch(tmp_path, "--processes", "2", "--cuda-as-cpu", str(script))
    assert sorted(ended.stdout.splitlines()) == ["[0] 2 2 cpu", "[1] 2 2 cpu"]


@pytest.mark.slow
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


@pytest.mark.slow
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
