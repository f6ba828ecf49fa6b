"""Jobs on this machine and its GPUs, which CUDA_VISIBLE_DEVICES makes up; nothing computes on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.estimator.jobs import estimator, outputs_of

SAVE = """
import json
if rank == 0:
    names = ["SMP_LITE_DEVICE", "SM_NUM_GPUS", "FI_PROVIDER", "NCCL_SOCKET_IFNAME"]
    output("seen", json.dumps([world.size, *[os.environ.get(name) for name in names]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance_type", "hosts", "expected"),
    [
        ("local", 1, [2, "cpu", "0", None, None]),
        ("ml.p4d.24xlarge", 1, [2, "cpu", "0", None, None]),
        ("local_gpu", 1, [2, "cuda", "2", None, None]),
        ("local", 2, [4, "cpu", "0", None, None]),
    ],
)
def test_a_job_on_this_machine_uses_its_gpus_if_that_is_asked_for(
    instance_type: str, hosts: int, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the SDK's own estimator, which checks nothing and sends no number.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    processes = {} if instance_type == "local_gpu" else {"processes_per_host": 2}
    modelparallel = {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}
    job = estimator(
        tmp_path,
        SAVE,
        instance_type=instance_type,
        instance_count=hosts,
        distribution={
            "smdistributed": {"modelparallel": modelparallel},
            "mpi": {"enabled": True, **processes},
        },
    )
    job.fit(logs="None")
    assert json.loads(outputs_of(job)["seen"]) == expected
