"""What ranks with offloaded activations run on a device; called by name through `tests.harness`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.runtime.offloading.kept_input import KeptInput
from smp_lite.runtime.offloading.offload import ActivationOffload
from smp_lite.runtime.offloading.pinned_store import PinnedStore

__all__ = ["failing", "layouts_come_back", "store_alone", "trained"]

WIDTH, ROWS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 128), nn.Dropout(0.3), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.sigmoid(self.up(x))))


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.row = nn.Sequential(*(Block() for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.row(self.stem(x)))


class Held(Row):
    """What a checkpointed block is given is used elsewhere, by a residual, a view, and in another block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.row:
            y = block(x)
            x = torch.tanh(y * torch.sin(x) + x[:, :1].exp() + block(x * 1.0))
        return self.head(x)


def _offloads() -> list[ActivationOffload]:
    executors = smp.state.model.runtime.executors.values()
    return [e.offload for e in executors if e.offload is not None]


def trained(
    microbatches: int, *, wire: str | None = None, in_memory: dict[str, Any] | None = None, held: bool = False
) -> dict[str, Any]:
    """Trains some steps: losses, parameters, what has left, what the host waited for, memory at the peak.

    Args:
        in_memory: parameters of a session that plays all stages; None: there are ranks.
        held: others hold what blocks are given.
    """
    if wire is not None:
        os.environ["SMP_LITE_WIRE"] = wire
    if in_memory is None:
        smp.init()
    else:
        smp.init_in_memory(in_memory)
    device: Any = torch.get_device_module(smp.state.device)
    torch.manual_seed(0)
    net = Held() if held else Row()
    model = smp.DistributedModel(net)
    if held:
        for block in net.row:
            smp.set_activation_checkpointing(block)
    else:
        smp.set_activation_checkpointing(net.row, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses, peaks, waits = [], [], []
    for number in range(3):
        x = torch.linspace(-1, number, microbatches * ROWS * WIDTH).reshape(-1, WIDTH)
        optimizer.zero_grad()
        device.synchronize()
        device.reset_peak_memory_stats()
        own, before = device.memory_allocated(), _host_waits()
        found = step(model, x)
        waits.append(_host_waits() - before)
        device.synchronize()
        peaks.append(device.max_memory_allocated() - own)
        losses.append([float(loss) for loss in found.outputs])
        optimizer.step()
    stores = [offload._store for offload in _offloads()]
    return {
        "losses": losses,
        "state": {name: p.detach().cpu() for name, p in model.local_named_parameters()},
        "left": sum(offload.bytes_left for offload in _offloads()),
        "rows": [store.rows_made for store in stores if isinstance(store, PinnedStore)],
        "waits": waits,
        "peak": peaks[-1],
    }


def _host_waits() -> int:
    if smp.state.device.type == "cuda":
        return 0  # torch itself warns of them
    from tests.pretended_device import order

    return order.host_waits


def layouts_come_back() -> list[str]:
    """Which layouts come back otherwise than they were."""
    smp.init_in_memory({"partitions": 1})
    device = smp.state.device
    offload = ActivationOffload(1)
    base = torch.arange(240.0, device=device).reshape(4, 6, 10)
    layouts = {
        "gaps": base[:, ::2, 3:7],
        "transposed": base.transpose(0, 2),
        "half": base[1].to(torch.bfloat16),
        "expanded": base[:1, :1].expand(4, 5, 10),
    }
    wrong = []
    for name, tensor in layouts.items():
        expected, strides = tensor.cpu().clone(), tensor.stride()
        kept = KeptInput(tensor.detach(), offload.store)
        kept.leave()
        if not kept.has_left(must=True) or kept.tensor is not None:
            wrong.append(f"{name} has not left")
        found = kept.get()
        if found.device != device or found.stride() != strides or not torch.equal(found.cpu(), expected):
            wrong.append(name)
    return wrong


def store_alone() -> list[bool]:
    """Whether what a store is given back at once, and let go of at once, is right."""
    smp.init_in_memory({"partitions": 1})
    device = smp.state.device
    module: Any = torch.get_device_module(device)
    store = PinnedStore()
    place, other = store.place(300), store.place(300)
    first = torch.arange(300, device=device).to(torch.uint8)
    expected = first.cpu()
    back = torch.empty(300, dtype=torch.uint8, device=device)
    store.write(first, place)
    reading = store.read(back, place)  # before the copy out has ended
    store.write(first + 1, place)  # over what is still to be read
    right = [reading.followed() and torch.equal(back.cpu(), expected)]
    store.write(first * 3, other)  # nobody else holds what is written
    again = torch.empty_like(back)
    reading = store.read(torch.empty_like(back), place)
    del reading
    store.read(again, other)
    store.settle()
    module.synchronize()
    right.append(torch.equal(again.cpu(), expected * 3))
    store.free(place, 300)
    right.append(store.place(301) is place)
    return right


def failing() -> tuple[str, list[float]]:
    """The error of a step where the host has no memory, and losses before and after it."""
    smp.init()
    torch.manual_seed(0)
    net = Row()
    for block in net.row:
        block.drop.p = 0.0
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(net.row, strategy="each")

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    from smp_lite.runtime.offloading import pinned_store

    def refuse(num_bytes: int) -> Tensor:
        raise RuntimeError("pretended: no memory")

    text, losses, ours = "nothing was raised", [], pinned_store.host_memory
    for number, rows in enumerate((4, 16, 4)):
        if number == 1 and smp.rank() == 1:
            pinned_store.host_memory = refuse  # type: ignore[assignment]
        try:
            losses.append(float(step(model, torch.ones(4 * rows, WIDTH)).reduce_mean()))
        except smp.SMPError as error:
            text = str(error)
        pinned_store.host_memory = ours
    return text, losses
