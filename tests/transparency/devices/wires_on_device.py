"""What the ranks run for the tests of wires from device to device."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import smp_lite as smp
from smp_lite.comm.wires.announced import AnnouncedWire
from smp_lite.comm.wires.grouped import GroupedCarrier
from smp_lite.comm.wires.wire import Transfer, Wire
from smp_lite.errors import SMPError
from smp_lite.record.values.placed import TensorMeta
from smp_lite.session import current
from tests.models.layers import Chain, regression_batch
from tests.pretended_device import order
from tests.transparency.values.strides import layouts

__all__ = ["choice", "choice_after_a_trial", "freed_early", "grouped", "host_waits", "mapped", "spans"]

_LARGE = 1 << 20
"""Elements; memory of this size goes back to the system at once when it is freed."""


def choice(wire: str | None) -> str:
    """The wire that the job takes, as the log's first lines say it; or the error."""
    if wire is not None:
        os.environ["SMP_LITE_WIRE"] = wire
    try:
        smp.init()
        return current().describe_wire()
    except smp.SMPError as error:
        return str(error)


def choice_after_a_trial(fault: str, wire: str | None) -> str:
    """The same where rank 1 cannot offer its memory, reach the other's, or reads other numbers in it."""
    from tests.pretended_device.sharing import PretendedSharing

    def refused(*args: Any) -> Any:
        raise SMPError("CUDA's driver, cuIpcOpenMemHandle_v2: invalid device context (201)")

    faults = {
        "offers": ("name", refused),
        "reaches": ("copy", refused),
        "reads": ("copy", lambda *args: None),
    }
    name, other = faults[fault]
    kept = getattr(PretendedSharing, name)
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
        setattr(PretendedSharing, name, other)
    try:
        return choice(wire)
    finally:
        setattr(PretendedSharing, name, kept)


def mapped() -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Every layout from stage 0 to 1 over ``ipc``: what has arrived, on the host, and its strides."""
    os.environ["SMP_LITE_WIRE"] = "ipc"
    smp.init()
    wire = current().wire()
    assert type(wire) is AnnouncedWire
    return _send_layouts(wire)


def grouped() -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """The same over process groups: gloo's, which carry the host's tensors."""
    smp.init()
    announcing = current().wire()
    assert announcing is not None
    onward, back = (dist.new_group([0, 1], backend="gloo") for _ in range(2))
    carrier = GroupedCarrier(onward, back, smp.pp_rank(), [0, 1], torch.device("cpu"))
    return _send_layouts(AnnouncedWire(announcing, carrier))


def _send_layouts(wire: Wire) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    device = current().device
    found, under_way = {}, []
    for name, tensor in layouts().items():
        meta = TensorMeta.of(torch.empty(tensor.shape, device=device))
        if smp.pp_rank() == 0:
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0).to(device)
            there = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            transfer = wire.send(there, meta, 1)
        else:
            transfer = wire.receive(meta, 0)
        under_way.append((name, transfer))
    for name, transfer in under_way:
        _wait(transfer)
        if smp.pp_rank() == 1:
            arrived = transfer.tensor()
            found[name] = arrived.cpu().clone(memory_format=torch.contiguous_format), arrived.stride()
    smp.barrier()  # a send is done before it is received
    return found


def freed_early() -> list[float]:
    """Each rank sends tensors to the other and lets go of them at once; the sums of what arrives."""
    os.environ["SMP_LITE_WIRE"] = "ipc"
    smp.init()
    wire = current().wire()
    assert wire is not None
    device = current().device
    meta = TensorMeta.of(torch.empty(_LARGE, device=device))
    peer = 1 - smp.pp_rank()
    under_way, sums = [], []
    for number in range(4):
        under_way.append(wire.send(torch.full((_LARGE,), float(number), device=device), meta, peer))
        torch.full((_LARGE,), -1.0, device=device)  # takes the memory, if it is free
    time.sleep(0.2)
    for _ in range(4):
        transfer = wire.receive(meta, peer)
        _wait(transfer)
        sums.append(float(transfer.tensor().cpu().mean()))
    for transfer in under_way:
        _wait(transfer)
    return sums


def _wait(transfer: Transfer) -> None:
    end = time.monotonic() + 20
    while not transfer.done():
        assert time.monotonic() < end, "nothing has arrived"


def host_waits(own: bool, wire: str, looks: bool) -> tuple[list[int], list[float]]:
    """How often this rank's host waits for its device in each of some steps, and the last step's losses.

    Args:
        own: each rank has a device of its own, which process groups join; else both share one.
        wire: that values go by.
        looks: the step function looks at a number.
    """
    os.environ["SMP_LITE_WIRE"] = wire
    from tests.pretended_device.groups import offered  # older torch has no backends in Python

    with offered(own=own):
        smp.init()
        torch.manual_seed(0)
        model = smp.DistributedModel(Chain())

        @smp.step
        def train(model: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            errors = (model(x) - target).square()
            loss = errors.mean()
            model.backward(loss if not looks or loss > 0 else -loss)
            return loss, errors

        batch = {name: tensor.to(smp.state.device) for name, tensor in regression_batch(8).items()}
        waits = []
        for _ in range(6):
            before = order.host_waits
            loss, _ = train(model, **batch)
            waits.append(order.host_waits - before)
        return waits, [float(each) for each in loss.outputs]


def spans() -> list[tuple[str, float, float]]:
    """Of a step on the device: action, begin and end after the step's own begin, in seconds."""
    smp.init()
    model = smp.DistributedModel(Chain())

    @smp.step
    def train(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = (model(x) - target).square().mean()
        model.backward(loss)
        return loss

    batch = regression_batch(8)
    train(model, **batch)
    begin_s = time.perf_counter()
    train(model, **batch)
    end_s = time.perf_counter()
    assert model.runtime is not None
    (own,) = model.runtime.runner.spans().values()
    assert own[0].start_s > begin_s and own[-1].end_s < end_s
    return [(str(span.action), span.start_s - begin_s, span.end_s - begin_s) for span in own]
