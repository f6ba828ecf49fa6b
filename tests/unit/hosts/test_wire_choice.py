"""Which wire a job on the host takes, and what is wrong with the variable that names one.

Jobs on devices, which ask each other, are in :mod:`tests.transparency.devices.test_wires_on_device`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp_lite.comm.wires.choice import choose_wire, described
from smp_lite.errors import SMPError

HOST = torch.device("cpu")
GROUP = object()


def chosen(environment: dict[str, str], has_mpi: bool, has_group: bool) -> str:
    world: Any = SimpleNamespace(transport=SimpleNamespace(has_mpi=has_mpi))
    return choose_wire(environment, world, GROUP if has_group else None, HOST)


@pytest.mark.parametrize(
    ("environment", "has_mpi", "has_group", "kind"),
    [
        ({}, True, False, "mpi"),
        ({}, False, False, "c10d"),
        ({"SMP_LITE_WIRE": "c10d"}, True, True, "c10d"),
        ({"SMP_LITE_WIRE": "mpi"}, True, True, "mpi"),
    ],
)
def test_the_kind(environment: dict[str, str], has_mpi: bool, has_group: bool, kind: str) -> None:
    assert chosen(environment, has_mpi, has_group) == kind


@pytest.mark.parametrize(
    ("value", "has_mpi", "words"),
    [
        ("smoke", True, "'mpi', 'c10d', 'ipc', 'nccl'"),
        ("mpi", False, "use mpirun"),
        ("c10d", True, "ddp: True"),
        ("ipc", True, "no other device"),
        ("nccl", True, "no other device"),
    ],
)
def test_a_wire_that_cannot_be_is_refused(value: str, has_mpi: bool, words: str) -> None:
    with pytest.raises(SMPError, match=words) as caught:
        chosen({"SMP_LITE_WIRE": value}, has_mpi, has_group=False)
    assert "SMP_LITE_WIRE=" in str(caught.value)


def test_what_the_log_says() -> None:
    assert described("mpi", HOST) == "wire mpi"
    assert described("mpi", torch.device("meta")) == "wire mpi, through the host's memory"
    assert described("ipc", torch.device("meta")) == "wire ipc"
