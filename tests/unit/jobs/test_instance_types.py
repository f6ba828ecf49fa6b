"""The table of instance types, against what the service takes and the SDK knows."""

from __future__ import annotations

import json
from pathlib import Path

import botocore.session
import pytest

from smp_lite.entrypoints.container.instance_types import INSTANCE_TYPES, gpus_of_type

sagemaker = pytest.importorskip("sagemaker")

NOT_FOUND = {
    f"ml.g7.{size}" for size in ("2xlarge", "4xlarge", "8xlarge", "12xlarge", "24xlarge", "48xlarge")
}
"""The service takes them, and no document of AWS was found that says how many GPUs they have."""


def taken_by_the_service() -> set[str]:
    model = botocore.session.get_session().get_service_model("sagemaker")
    return set(model.shape_for("TrainingInstanceType").enum)


def test_it_has_every_type_with_gpus_that_the_service_takes() -> None:
    families = ("ml.p", "ml.g")
    assert {name for name in taken_by_the_service() if name.startswith(families)} - NOT_FOUND == set(
        INSTANCE_TYPES
    )


def test_the_numbers_are_those_of_the_sdk() -> None:
    file = Path(sagemaker.__file__).parent / "image_uri_config" / "instance_gpu_info.json"
    known = json.loads(file.read_text())["us-east-1"]
    both = known.keys() & INSTANCE_TYPES.keys()
    assert len(both) > 20
    assert {name: INSTANCE_TYPES[name].count for name in both} == {
        name: known[name]["Count"] for name in both
    }
    # GB as they are sold; the last one is smaller by what the hypervisor keeps.
    total = {name: INSTANCE_TYPES[name].count * INSTANCE_TYPES[name].memory_gb * 1024 for name in both}
    assert {name for name in both if total[name] != known[name]["TotalGpuMemoryInMiB"]} == {"ml.g5.48xlarge"}


# Of sagemaker-training 5.1.4; trn1 has no GPUs.
TOOLKIT_RDMA = ["p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p6e-gb200.36xlarge"]
TOOLKIT_EFA = ["g4dn.8xlarge", "g4dn.12xlarge", "g5.48xlarge", "p3dn.24xlarge"]


def test_whatever_awss_launcher_knows_of_efa_is_known() -> None:
    for name in TOOLKIT_RDMA + TOOLKIT_EFA:
        assert INSTANCE_TYPES[f"ml.{name}"].efa, name
        assert INSTANCE_TYPES[f"ml.{name}"].rdma == (name in TOOLKIT_RDMA), name
    assert not [name for name, gpus in INSTANCE_TYPES.items() if gpus.rdma and not gpus.efa]


@pytest.mark.parametrize(
    "name",
    [None, "", "local", "local_gpu", "ml.c5.xlarge", "ml.g7.48xlarge", "p4d.24xlarge", "ml.p9.48xlarge"],
)
def test_nothing_is_guessed_about_others(name: str | None) -> None:
    assert gpus_of_type(name) is None


def test_how_a_host_is_described() -> None:
    assert str(gpus_of_type("ml.p4de.24xlarge")) == "8 GPUs (A100, 80 GB each)"
    assert str(gpus_of_type("ml.g5.xlarge")) == "1 GPU (A10G, 24 GB each)"
