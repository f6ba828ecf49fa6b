"""Wires from device to device, between real processes; the device is pretended, its memory is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.transparency.devices.test_on_device import check
from tests.transparency.values.strides import layouts
from tests.transparency.values.test_strides import CHANGED

OWN = "tests.transparency.devices.wires_on_device"
WITH_GROUPS = {"partitions": 2, "ddp": True}


def run(function: str, devices: int, parameters: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
    parameters = parameters or {"partitions": 2}
    return run_distributed(f"{OWN}:{function}", 2, devices=devices, parameters=parameters, kwargs=kwargs)


@pytest.mark.ci
@pytest.mark.parametrize(("function", "devices"), [("mapped", 1), ("mapped", 2), ("grouped", 0)])
def test_every_layout_arrives(function: str, devices: int) -> None:
    _, found = run(function, devices, WITH_GROUPS)
    for name, tensor in layouts().items():
        arrived, stride = found[name]
        assert torch.equal(arrived, tensor), name
        is_plain = devices and name == "negated"  # what goes to the device is the negative already
        assert stride == (tensor.stride() if is_plain else CHANGED.get(name, tensor.stride())), name


def test_what_is_sent_stays_until_it_is_read() -> None:
    assert run("freed_early", 1) == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("devices", "wire", "parameters", "said"),
    [
        (1, None, {"partitions": 2}, "wire ipc"),
        (2, "mpi", {"partitions": 2}, "wire mpi, through the host's memory"),
        (2, "c10d", WITH_GROUPS, "wire c10d, through the host's memory"),
        (0, None, {"partitions": 2}, "wire mpi"),
        (2, "nccl", WITH_GROUPS, "SMP_LITE_WIRE=nccl: the process groups are gloo's, which do not carry"),
        (2, "nccl", {"partitions": 2}, "SMP_LITE_WIRE=nccl: it needs ddp: True"),
        (0, "ipc", {"partitions": 2}, "SMP_LITE_WIRE=ipc: tensors are the host's"),
        (0, "c10d", {"partitions": 2}, "SMP_LITE_WIRE=c10d: it needs ddp: True"),
        (2, "tcp", {"partitions": 2}, "SMP_LITE_WIRE='tcp': it must be one of 'mpi', 'c10d', 'ipc', 'nccl'"),
    ],
)
def test_the_wire_is_what_there_is_or_what_was_named(
    devices: int, wire: str | None, parameters: dict[str, Any], said: str
) -> None:
    for found in run("choice", devices, parameters, wire=wire):
        assert found.startswith(said)
        assert found == said or "Error" not in found


@pytest.mark.pretended
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("offers", "it was tried, and CUDA's driver, cuIpcOpenMemHandle_v2"),
        ("reaches", "it was tried, and CUDA's driver, cuIpcOpenMemHandle_v2"),
        ("reads", "it was tried, and the memory of rank 0 of the group held other numbers"),
    ],
)
def test_memory_of_the_others_is_tried_before_it_is_relied_on(fault: str, why: str) -> None:
    found = run("choice_after_a_trial", 1, fault=fault, wire=None)
    assert found == ["wire mpi, through the host's memory"] * 2
    for text in run("choice_after_a_trial", 1, fault=fault, wire="ipc"):
        assert text.startswith(f"SMP_LITE_WIRE=ipc: {why}")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt_tied", "unet", "complex64", "data_loop"])
def test_models(name: str) -> None:
    check(name, 2, wire="ipc")


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
def test_four_ranks(pipeline: str) -> None:
    check("gpt_tied", 4, wire="ipc", pipeline=pipeline)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("where", "failing_rank"), [("forward", 0), ("backward", 1), ("recording", 1)])
def test_a_step_that_fails_and_the_next_one(where: str, failing_rank: int) -> None:
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_rank",
        2,
        devices=1,
        kwargs={"where": where, "failing_rank": failing_rank, "wire": "ipc"},
        parameters={"partitions": 2, "microbatches": 4},
    )
    assert [equal for equal, _ in found] == [True, True]
    assert all(texts for _, texts in found)


def test_spans_are_those_of_the_device() -> None:
    for own in run("spans", 1, {"partitions": 2, "microbatches": 2}):
        assert len(own) == len({action for action, _, _ in own}) >= 4
        ends = [0.0]
        for _, start_s, end_s in own:
            assert ends[-1] <= start_s < end_s
            ends.append(end_s)


@pytest.mark.ci
@pytest.mark.pretended
@pytest.mark.parametrize(("own", "wire"), [(True, "ipc"), (True, "mpi"), (False, "ipc"), (False, "mpi")])
def test_no_host_waits_for_its_device_but_for_numbers_that_the_script_looks_at(own: bool, wire: str) -> None:
    """From the fourth step on: of the first three the batches are compared between ranks."""
    losses = []
    for looks in (False, True):
        found = run("host_waits", 1, {**WITH_GROUPS, "microbatches": 4}, own=own, wire=wire, looks=looks)
        assert found[0][1] == found[1][1]
        losses.append(found[0][1])
        for waits, _ in found:
            assert all(waits[:3])
            assert waits[3:] == [4 if looks else 0] * 3
    assert losses[0] == losses[1]
