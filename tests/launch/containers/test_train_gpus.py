"""`train` in a container on hosts with GPUs. CUDA_VISIBLE_DEVICES makes them up; nothing computes on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.containers.test_train import make_tree, train

SHOW = """
names = ["SMP_LITE_DEVICE", "SM_NUM_GPUS", "FI_PROVIDER", "NCCL_PROTO", "NCCL_SOCKET_IFNAME"]
if rank == 0:
    print("seen", world.size, *[os.environ.get(name, "-") for name in names])
"""


def seen(output: str) -> list[str]:
    """What rank 0 has seen: number of ranks, then the variables."""
    (line,) = [line for line in output.splitlines() if line.startswith("[0] seen ")]
    return line.split()[2:]


def tree(root: Path, instance_type: str, **changes: Any) -> Path:
    made = make_tree(root, SHOW, **changes)
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": instance_type}
    (made / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    return made


@pytest.mark.parametrize(
    ("instance_type", "gpus", "environment", "expected"),
    [
        ("ml.p3.8xlarge", "0,1", {}, ["2", "cuda", "2", "-", "-", "-"]),
        ("ml.g7.12xlarge", "0,1", {}, ["2", "cuda", "2", "-", "-", "-"]),
        ("ml.p3.8xlarge", "0,1", {"SMP_LITE_DEVICE": "cpu"}, ["2", "cpu", "2", "-", "-", "-"]),
        ("ml.p3.8xlarge", "0,1", {"SMP_LITE_CUDA_AS_CPU": "1"}, ["2", "-", "2", "-", "-", "-"]),
        ("ml.c5.xlarge", "", {}, ["1", "-", "0", "-", "-", "-"]),
    ],
)
@pytest.mark.slow(keep=1)
def test_a_host_has_a_rank_for_each_gpu(
    instance_type: str, gpus: str, environment: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    root = tree(tmp_path, instance_type, processes=None, mp_parameters={"partitions": int(expected[0])})
    code, output = train(root, CUDA_VISIBLE_DEVICES=gpus, **environment)
    assert code == 0, output
    assert seen(output) == expected
    assert "stay idle" not in output


def test_more_ranks_than_gpus_end_the_job_at_once_unless_they_share(tmp_path: Path) -> None:
    root = tree(tmp_path, "ml.p3.8xlarge", processes=4, mp_parameters={"partitions": 4})
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    code, _ = train(root, **one)
    told = (root / "output" / "failure").read_text()
    assert code == 1
    assert told.startswith(
        "mpi.processes_per_host=4, but host algo-1 has 1 GPU, and each rank needs one: write 1"
    )
    assert not (root / "code").exists()
    code, output = train(root, **one, SMP_LITE_SHARE_GPUS="1")
    assert (code, seen(output)[:3]) == (0, ["4", "cuda", "1"]), output
    code, _ = train(root, **one, SMP_LITE_SHARE_GPUS="yes")
    assert (root / "output" / "failure").read_text() == "SMP_LITE_SHARE_GPUS='yes': it must be 0 or 1"


def test_gpus_that_no_rank_uses_are_told(tmp_path: Path) -> None:
    code, output = train(tree(tmp_path, "ml.p3.8xlarge"), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (code, seen(output)[:3]) == (0, ["2", "cuda", "4"]), output
    assert "smp-lite: 2 of 4 GPUs of host algo-1 stay idle: mpi.processes_per_host=2\n" in output


def test_a_host_that_lacks_the_gpus_of_its_type_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "ml.p3.8xlarge")
    code, _ = train(root, CUDA_VISIBLE_DEVICES="")
    told = (root / "output" / "failure").read_text()
    assert code == 1
    assert told.startswith(
        "instance_type='ml.p3.8xlarge' has 4 GPUs (V100, 16 GB each), and none is to be seen"
    )
    code, output = train(root, CUDA_VISIBLE_DEVICES="", SMP_LITE_DEVICE="cpu")
    assert (code, seen(output)) == (0, ["2", "cpu", "0", "-", "-", "-"]), output


@pytest.mark.ci
def test_the_users_word_about_the_network_arrives(tmp_path: Path) -> None:
    options = "-x FI_PROVIDER=tcp -x SMP_LITE_DEVICE=cpu"
    root = tree(tmp_path, "ml.g5.12xlarge", sagemaker_mpi_custom_mpi_options=options)
    code, output = train(root, CUDA_VISIBLE_DEVICES="0,1", NCCL_PROTO="LL128")
    assert (code, seen(output)) == (0, ["2", "cpu", "2", "tcp", "LL128", "-"]), output
    code, output = train(tree(tmp_path / "b", "ml.g5.12xlarge"), CUDA_VISIBLE_DEVICES="0,1")
    assert (code, seen(output)) == (0, ["2", "cuda", "2", "efa", "simple", "-"]), output
