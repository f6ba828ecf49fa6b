"""GPUs of a host and the ranks on it: counted, held against each other, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.gpus import (
    check_ranks_per_host,
    computes_on_gpus,
    count_gpus,
    gpus_for_ranks,
    idle_gpus,
    shares_gpus,
)


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        ("0,1,2", 3),
        ("3", 1),
        ("", 0),
        (" ", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, GPU-1", 2),
    ],
)
def test_what_cuda_would_see_is_counted(visible: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == number


def test_without_a_word_the_devices_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({}, tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("environment", "uses"),
    [
        ({}, True),
        ({"SMP_LITE_DEVICE": "cuda"}, True),
        ({"SMP_LITE_DEVICE": "cpu"}, False),
        ({"SMP_LITE_CUDA_AS_CPU": "1"}, False),
        ({"SMP_LITE_CUDA_AS_CPU": "0"}, True),
    ],
)
def test_who_computes_elsewhere_has_no_gpus(environment: dict[str, str], uses: bool) -> None:
    assert computes_on_gpus(environment) == uses
    found = gpus_for_ranks("ml.p3.16xlarge", environment, one_machine=False, found=8)
    assert found == (8 if uses else 0)


@pytest.mark.parametrize(
    ("instance_type", "one_machine", "found", "number"),
    [
        (None, False, 4, 4),
        ("ml.c5.xlarge", False, 0, 0),
        ("ml.p99.48xlarge", False, 16, 16),
        ("ml.p3.16xlarge", False, 2, 2),
        # On somebody's own machine its GPUs are for those who say so.
        ("local", True, 4, 0),
        ("ml.p3.16xlarge", True, 4, 0),
        ("ml.p3.16xlarge", True, 0, 0),
        ("local_gpu", True, 4, 4),
    ],
)
def test_which_gpus_are_for_the_ranks(
    instance_type: str | None, one_machine: bool, found: int, number: int
) -> None:
    assert gpus_for_ranks(instance_type, {}, one_machine=one_machine, found=found) == number


@pytest.mark.parametrize(
    ("instance_type", "one_machine", "told"),
    [
        (
            "ml.p3.8xlarge",
            False,
            r"^instance_type='ml\.p3\.8xlarge' has 4 GPUs \(V100, 16 GB each\), and none is",
        ),
        (
            "local_gpu",
            True,
            r"^instance_type='local_gpu' takes the GPUs of this machine, and none.*\"local\"",
        ),
    ],
)
def test_gpus_that_are_promised_and_not_there_are_an_error(
    instance_type: str, one_machine: bool, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        gpus_for_ranks(instance_type, {}, one_machine=one_machine, found=0)
    nothing = {"SMP_LITE_DEVICE": "cpu"}
    assert gpus_for_ranks(instance_type, nothing, one_machine=one_machine, found=0) == 0


@pytest.mark.parametrize(
    ("processes", "changes"),
    [(8, {}), (1, {}), (9, {"share": True})],
)
def test_ranks_that_have_a_gpu_each_or_share_pass(processes: int, changes: dict[str, Any]) -> None:
    check_ranks_per_host(processes, 8, where="the host", **{"share": False, **changes})
    check_ranks_per_host(processes, 0, where="a host without", share=False)


@pytest.mark.parametrize(
    ("processes", "gpus", "told"),
    [
        (
            9,
            8,
            "mpi.processes_per_host=9, but H has 8 GPUs, and each rank needs one: write 8 or less, or set",
        ),
        (
            2,
            1,
            "mpi.processes_per_host=2, but H has 1 GPU, and each rank needs one: write 1 or less, or set ",
        ),
    ],
)
def test_more_ranks_than_gpus_are_refused(processes: int, gpus: int, told: str) -> None:
    with pytest.raises(ValueError, match="each rank needs one") as caught:
        check_ranks_per_host(processes, gpus, where="H", share=False)
    assert str(caught.value).startswith(told)
    for way_out in ("SMP_LITE_SHARE_GPUS=1", "SMP_LITE_DEVICE=cpu"):
        assert way_out in str(caught.value)


def test_gpus_without_a_rank_are_told() -> None:
    assert idle_gpus(8, 8, where="H") is None
    assert idle_gpus(16, 8, where="H") is None
    assert idle_gpus(1, 0, where="H") is None
    assert idle_gpus(6, 8, where="H") == "2 of 8 GPUs of H stay idle: mpi.processes_per_host=6"


@pytest.mark.parametrize("text", ["yes", "", "true", "2"])
def test_sharing_is_a_yes_or_no(text: str) -> None:
    assert [shares_gpus(given) for given in ({}, {"SMP_LITE_SHARE_GPUS": "0"})] == [False, False]
    assert shares_gpus({"SMP_LITE_SHARE_GPUS": "1"})
    with pytest.raises(ValueError, match=f"SMP_LITE_SHARE_GPUS='{text}': it must be 0 or 1"):
        shares_gpus({"SMP_LITE_SHARE_GPUS": text})
