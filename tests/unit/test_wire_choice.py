"""Which wire a job takes, and what is wrong with the variable that names one."""

from __future__ import annotations

import pytest
import torch

from smp_lite.comm.wires.choice import described, wire_kind
from smp_lite.errors import SMPError


@pytest.mark.parametrize(
    ("environment", "has_mpi", "has_groups", "kind"),
    [
        ({}, True, False, "mpi"),
        ({}, False, False, "c10d"),
        ({"SMP_LITE_WIRE": "c10d"}, True, True, "c10d"),
        ({"SMP_LITE_WIRE": "mpi"}, True, True, "mpi"),
    ],
)
def test_the_kind(environment: dict[str, str], has_mpi: bool, has_groups: bool, kind: str) -> None:
    assert wire_kind(environment, has_mpi=has_mpi, has_groups=has_groups) == kind


@pytest.mark.parametrize(
    ("value", "has_mpi", "words"),
    [("smoke", True, "'mpi' or 'c10d'"), ("mpi", False, "use mpirun"), ("c10d", True, "ddp: True")],
)
def test_a_wire_that_cannot_be_is_refused(value: str, has_mpi: bool, words: str) -> None:
    with pytest.raises(SMPError, match=words) as caught:
        wire_kind({"SMP_LITE_WIRE": value}, has_mpi=has_mpi, has_groups=False)
    assert "SMP_LITE_WIRE=" in str(caught.value)


def test_what_the_log_says() -> None:
    assert described("mpi", None, torch.device("cpu")) == "wire mpi"
    assert described("mpi", None, torch.device("meta")) == "wire mpi, through the host's memory"
