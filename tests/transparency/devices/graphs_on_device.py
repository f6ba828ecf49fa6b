"""What ranks run whose replayed steps become graphs of the device; called by name through `tests.harness`."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.comm.on_device.watch import Watched, first_overdue
from smp_lite.device_graphs import DeviceGraph, new_pool
from smp_lite.devices import event, home
from smp_lite.runtime.graphs.stage_graphs import GRAPHS_VARIABLE
from smp_lite.runtime.graphs.stand_ins import stand_ins
from tests.models import CASES
from tests.transparency.comparison import NUM_MICROBATCHES, place

__all__ = ["given_up", "reasons", "stood_in", "train_case", "train_changing", "watched_while_capturing"]

STEPS = 6


def _start(graphs: bool, in_memory: dict[str, Any] | None) -> None:
    os.environ[GRAPHS_VARIABLE] = str(int(graphs))
    if in_memory is None:
        smp.init()
    else:
        smp.init_in_memory({"microbatches": NUM_MICROBATCHES, "static_mode": True, **in_memory})


def _graphs() -> list[Any]:
    executors = smp.state.model.runtime.executors.values()
    return [executor.graphs for executor in executors if executor.graphs is not None]


def train_case(name: str, graphs: bool, in_memory: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains a case with another batch in each step, and gradients added up over two of them.

    What the first replayed step returns is looked at when all steps have run.
    """
    _start(graphs, in_memory)
    case = CASES[name]
    torch.manual_seed(0)
    model = smp.DistributedModel(case.build())
    if in_memory is None or not in_memory.get("auto_partition", True):
        place(model.module, case.manual_stages(smp.pp_size()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, batch: Any) -> Any:
        loss = case.loss_of(case.forward_loss(model, batch))
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, batch: Any) -> Any:
        return case.loss_of(case.forward_loss(model, batch))

    torch.manual_seed(1)
    batches = case.batch(8 * STEPS)
    outputs, gradients = [], []
    for number in range(STEPS):
        batch = {
            key: value[8 * number : 8 * number + 8] if isinstance(value, Tensor) else value
            for key, value in batches.items()
        }
        if number % 2 == 0:
            optimizer.zero_grad()
        outputs += step(model, batch).outputs
        gradients += [
            (name, p.grad.detach().cpu().clone(), p.grad.stride())
            for name, p in model.local_named_parameters()
            if p.grad is not None
        ]
        if number % 2:
            optimizer.step()
        with torch.no_grad():
            outputs += evaluate(model, batch).outputs
    return {
        "losses": [output.detach().cpu() for output in outputs],
        "gradients": gradients,
        "parameters": [(name, p.detach().cpu()) for name, p in model.local_named_parameters()],
        "replayed": sum(stage.replayed for stage in _graphs()),
        "said": [stage.text() for stage in _graphs()],
    }


SCALES = [1.0]


class _Block(nn.Module):
    """Its Python reads an attribute, a list, a global, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor, self.powers = 1.0, [1.0]
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.factor * self.powers[0] * SCALES[0] + self.shift)


class _Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def _set_attribute(block: Any) -> None:
    block.factor = 2.0


def _set_item(block: Any) -> None:
    block.powers[0] = 2.0


def _set_global(block: Any) -> None:
    SCALES[0] = 2.0


def _fill_buffer(block: Any) -> None:
    block.shift.fill_(0.5)


def _replace_buffer(block: Any) -> None:
    block.shift = torch.full_like(block.shift, 0.5)


def _move_buffer(block: Any) -> None:
    block.shift.data = torch.full_like(block.shift, 0.5)


def _move_weight(block: Any) -> None:
    block.linear.weight.data = block.linear.weight.data * 2


def _freeze(block: Any) -> None:
    block.linear.bias.requires_grad_(False)


def _put_hook(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, args, out: out * 2)


CHANGES: dict[str, Callable[[Any], None]] = {
    "attribute": _set_attribute,
    "item": _set_item,
    "global": _set_global,
    "buffer filled": _fill_buffer,
    "buffer replaced": _replace_buffer,
    "buffer moved": _move_buffer,
    "weight moved": _move_weight,
    "frozen": _freeze,
    "hook": _put_hook,
}


def _trained(
    build: Callable[[], nn.Module], steps: int, between: Callable[[int, nn.Module], None]
) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(steps):
        between(number, model.module)
        optimizer.zero_grad()
        torch.manual_seed(number)
        losses += [float(loss) for loss in step(model, torch.randn(8, 8)).outputs]
        optimizer.step()
    return losses, [p.detach().cpu() for p in model.parameters()]


def train_changing(what: str, graphs: bool) -> tuple[list[Any], list[Any], int, int]:
    """Something is changed after some replays: losses, parameters, replays before it and in all."""
    SCALES[0] = 1.0
    _start(graphs, {"partitions": 1})
    seen = [0]

    def between(number: int, net: Any) -> None:
        if number == 6:
            seen[0] = sum(stage.replayed for stage in _graphs())
            CHANGES[what](net.blocks[0])

    losses, parameters = _trained(lambda: _Net(_Block(), _Block()), 11, between)
    return losses, parameters, seen[0], sum(stage.replayed for stage in _graphs())


# What is no graph -------------------------------------------------------------------------------------------


class _OnHost(_Block):
    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(8.0).sin()
        return super().forward(x) + table.to(x.device)


class _Reading(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (2.0 if y.sum().item() > -1e9 else 1.0)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _WithFunction(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return _Double.apply(super().forward(x))


class _Holding(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.extra.to(x.device)


class _Writing(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.shift.add_(1.0)
        return y


class _Summing(nn.Module):
    """The gradient of what it is given is one row, repeated."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 8)


class _HoldingInList(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.extras = [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.extras[0].to(x.device)


class _ReadingPlace(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.storage_offset() else 1.0)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "batchnorm": lambda: nn.BatchNorm1d(8),
    "on the host": _OnHost,
    "reading": _Reading,
    "function": _WithFunction,
    "holding": _Holding,
    "holding in a list": _HoldingInList,
    "place": _ReadingPlace,
    "writing": _Writing,
    "summing": _Summing,
}


def reasons(kind: str) -> tuple[bool, list[str], int]:
    """A model with such a part: whether it trains as without graphs, what is said, and how many replays."""
    found = []
    printed = io.StringIO()
    for graphs in (False, True):
        smp.reset()
        _start(graphs, {"partitions": 2, "pipeline": "interleaved"})
        with contextlib.redirect_stdout(printed):
            losses, values = _trained(lambda: _Net(_Block(), KINDS[kind](), _Block()), 5, lambda n, net: None)
        found.append((losses, values))
    same = found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))
    said = [line for line in printed.getvalue().splitlines() if GRAPHS_VARIABLE in line]
    return same, said, sum(stage.replayed for stage in _graphs())


class _Asking(_Block):
    """Asks for an event of the device, which a capture does not survive."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.asked()
        return super().forward(x)

    @staticmethod
    def asked() -> None:
        place = event()
        assert place is not None
        place.query()


def given_up() -> list[str]:
    """Errors of six steps whose segments the device does not capture; "" where there was none."""
    _start(True, {"partitions": 1})
    model = smp.DistributedModel(_Net(_Block(), _Asking()))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    errors = []
    for _ in range(6):
        try:
            step(model, torch.ones(8, 8))
            errors.append("")
        except smp.SMPError as error:
            errors.append(str(error))
    return errors


class _Tied(nn.Module):
    """Two layers with one weight, and one with lists of its parameters that the device has no kernels for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def stood_in() -> tuple[list[bool], list[bool], list[bool]]:
    """While a capture has others in the place of parameters: whether modules hold them, in the same memory,
    and autograd ends there; and whether all is as before afterwards."""
    _start(True, {"partitions": 1})
    net = _Tied()
    model = smp.DistributedModel(net)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(8, 4))
    parameters = list(net.parameters())
    before = [id(p) for p in net.unused._flat_weights]
    assert model.runtime is not None
    with stand_ins(model.runtime.placement, parameters) as others:
        held = [any(p is other for other in others) for p in net.parameters()]
        held.append(net.second.weight is net.first.weight)
        held.append(net.unused._flat_weights[0] is net.unused.weight_ih_l0)
        pairs = zip(parameters, others, strict=True)
        same = [a.untyped_storage()._cdata == b.untyped_storage()._cdata for a, b in pairs]
        found = torch.autograd.grad(net(torch.ones(8, 4, device=home())).sum(), others, allow_unused=True)
        held.append(sum(gradient is not None for gradient in found) == 3)
    after = [p is q for p, q in zip(parameters, net.parameters(), strict=True)]
    after.append(before == [id(p) for p in net.unused._flat_weights])
    return held, same, after


class _Place:
    """An event of the device's; who asks for it is noted."""

    def __init__(self) -> None:
        self.asked, self._event = 0, event()

    def query(self) -> bool:
        self.asked += 1
        assert self._event is not None
        return self._event.query()


def watched_while_capturing() -> tuple[list[int], str]:
    """How often a collective's events were asked for: before, in, and after a capture; the capture's error.

    Between them another thread looks at them, as that which watches devices does.
    """
    smp.init_in_memory({"partitions": 1})
    x = torch.ones(3, device=smp.state.device)
    watched, ended = Watched([0, 1]), _Place()
    watched.note(_Place(), ended)
    asked: list[int] = []

    def look() -> None:
        threads = [threading.Thread(target=first_overdue, args=(60.0,)) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        asked.append(ended.asked)

    look()
    graph, error = DeviceGraph(new_pool()), ""
    try:
        with graph.capturing():
            x.add_(1)
            look()
    except RuntimeError as refused:
        error = str(refused)
    look()
    return asked, error
