"""Values of environment variables that mean nothing are refused when ``smp.init`` begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_lite.config import Config
from smp_lite.errors import SMPError
from smp_lite.lifecycle.variables import check_variables, warn_of_unused


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SMP_LITE_CUDA_GRAPHS", "yes", "it must be 0 or 1"),
        ("SMP_LITE_CUDA_AS_CPU", "yes", "it must be '1' or '0'"),
        ("SMP_LITE_WIRE", "tcp", "it must be one of 'mpi', 'c10d', 'ipc', 'nccl'"),
        ("SMP_LITE_TRACE", "a file", r"cannot be written there \(File exists\): name a folder"),
        ("SMP_LITE_TRACE", "a file/below", r"cannot be written there \(Not a directory\): name a folder"),
        ("SMP_LITE_TRACE", "/proc/here", "cannot be written there .*: name a folder"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    variable: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").touch()
    with pytest.raises(SMPError, match=f"^{variable}='{value}': .*{told}"):
        check_variables({variable: value})


def test_a_folder_for_a_timeline_is_made_and_left_empty(tmp_path: Path) -> None:
    check_variables({"SMP_LITE_TRACE": str(tmp_path / "new" / "folder"), "SMP_LITE_CUDA_GRAPHS": "1"})
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    check_variables({"SMP_LITE_TRACE": "", "SMP_LITE_CUDA_AS_CPU": "", "SMP_LITE_WIRE": "mpi"})


@pytest.mark.filterwarnings("error")
def test_graphs_without_steps_to_replay_are_said_to_be_none() -> None:
    asked = {"SMP_LITE_CUDA_GRAPHS": "1"}
    with pytest.warns(UserWarning, match="SMP_LITE_CUDA_GRAPHS=1 has no effect without static_mode"):
        warn_of_unused(asked, Config.from_parameters({"partitions": 1}))
    warn_of_unused(asked, Config.from_parameters({"partitions": 1, "static_mode": True}))
    warn_of_unused({}, Config.from_parameters({"partitions": 1}))
