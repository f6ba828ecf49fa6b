"""``static_mode`` and the ordinary tensors of a step: what its own code makes of the batch and of the model.

Each model, or step function, makes tensors in another way. All steps equal plain torch to the bit, whether
they are replayed or have to be recorded; those that can be are replayed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.sampling import marked

WIDTH, ROWS, MICROBATCHES, STEPS = 4, 2, 3, 8
TEACHER = torch.ones(WIDTH, WIDTH)
Step = Callable[[Any, Tensor, Tensor, Any], Any]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class _Net(nn.Module):
    """Blocks on two stages, with its own code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def around(self, x: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        around = self.around(x)
        for block in self.blocks:
            x = x + block(x) * around
        return x


class _Counts(_Net):
    def around(self, x: Tensor) -> Any:
        self.count += 1
        return self.count / 10


class _Averages(_Net):
    """A buffer that commands capture, and that the next microbatch changes."""

    def around(self, x: Tensor) -> Any:
        self.scale.mul_(0.9).add_(x.detach().abs().mean() * 0.1)
        return self.scale


class _Derives(_Net):
    def around(self, x: Tensor) -> Any:
        return self.scale[:1] * 2


class _Looks(_Net):
    def around(self, x: Tensor) -> Any:
        return 2.0 if self.scale.item() > 3 else 1.0


class _CountsRows(_Net):
    def around(self, x: Tensor) -> Any:
        return len(x[x[:, 0] > 0]) / 2


class _Masks(_Net):
    def around(self, x: Tensor) -> Any:
        mask = torch.zeros(x.shape)
        mask[x > 0.5] = 1.0
        return mask


class _Casts(_Net):
    def around(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.t()).float().mean()


def _squares(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    loss = (model(x) - y).square().mean()
    backward(loss)
    return loss


def _one_hot(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    index = (x[:, :1].abs() * 3).long() % WIDTH
    loss = ((model(x) - y).square() * torch.zeros(ROWS, WIDTH).scatter_(1, index, 1.0)).mean()
    backward(loss)
    return loss


def _total(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    total = torch.zeros(())
    for row in x:
        total += row.sum().abs()
    loss = (model(x) - y).square().mean() * total
    backward(loss)
    return loss, total


def _valid(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    loss = (model(x) - y).square().sum() / max(y[y > 0.3].numel(), 1)
    backward(loss)
    return loss


def _loops(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    y.clamp_(min=-0.5)
    total = sum([row.sum() for row in y[y[:, 0] > 0]], torch.zeros(()))
    loss = (model(x) - y).square().mean() * (1 + total.abs())
    backward(loss)
    return loss


def _vmap(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    weight = torch.vmap(lambda row: row.square().sum())(x)
    loss = ((model(x) - y).square().mean(1) * weight).mean()
    backward(loss)
    return loss


def _grad(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    slope = torch.func.grad(lambda row: row.pow(3).sum())(x)
    loss = ((model(x) - y).square() * slope).mean()
    backward(loss)
    return loss


def _thread(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(x.abs()))
    thread.start()
    thread.join()
    loss = ((model(x) - y).square() * made.pop()).mean()
    backward(loss)
    return loss


def _by_numpy(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    mask = numpy.zeros((ROWS, WIDTH), dtype=numpy.float32)
    weight = torch.from_numpy(mask)
    weight[x > 0] = 2.0
    ones = torch.ones(ROWS, WIDTH)
    ones.numpy()[0] = 3.0
    loss = ((model(x) - y).square() * weight * ones).mean()
    backward(loss)
    return loss


def _unseen_change(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    weight = torch.zeros(ROWS, WIDTH)
    thread = threading.Thread(target=lambda: weight.copy_(x.abs()))
    thread.start()
    thread.join()
    loss = ((model(x) - y).square() * weight).mean()
    backward(loss)
    return loss


def _teacher(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    weight = TEACHER.abs() * 2
    loss = (model(x) @ weight - y).square().mean()
    backward(loss)
    return loss


def _given(model: Any, x: Tensor, y: Tensor, backward: Any) -> Any:
    output = model(x)
    backward(output, F.softmax(y, dim=-1) / ROWS)
    return output.sum()


def _change_scale(net: Any, number: int) -> None:
    with torch.no_grad():
        net.scale.fill_(1.0 + number)


def _change_teacher(net: Any, number: int) -> None:
    TEACHER.fill_(0.1 * (number + 1))


def _nothing(net: Any, number: int) -> None:
    pass


CASES: dict[str, tuple[type[_Net], Step, Any, bool]] = {
    "counter": (_Counts, _squares, _nothing, True),
    "average": (_Averages, _squares, _nothing, True),
    "derived from a buffer": (_Derives, _squares, _change_scale, True),
    "a buffer looked at": (_Looks, _squares, _change_scale, False),
    "rows counted": (_CountsRows, _squares, _nothing, False),
    "mask": (_Masks, _squares, _nothing, True),
    "autocast": (_Casts, _squares, _nothing, True),
    "one hot": (_Net, _one_hot, _nothing, True),
    "total": (_Net, _total, _nothing, True),
    "valid": (_Net, _valid, _nothing, False),
    "loop over rows": (_Net, _loops, _nothing, False),
    "vmap": (_Net, _vmap, _nothing, False),
    "grad": (_Net, _grad, _nothing, False),
    "thread": (_Net, _thread, _nothing, False),
    "numpy": (_Net, _by_numpy, _nothing, False),
    "unseen change": (_Net, _unseen_change, _nothing, False),
    "teacher": (_Net, _teacher, _change_teacher, False),
    "given gradient": (_Net, _given, _nothing, True),
}


@pytest.mark.ci(keep=3)
@pytest.mark.filterwarnings("ignore:static_mode")
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize("name", marked("host", CASES, "numpy"))
def test_tensors_of_a_replayed_step(name: str, pipeline: str) -> None:
    kind, function, before, is_replayed = CASES[name]
    smp.init_in_memory(
        {"partitions": 2, "microbatches": MICROBATCHES, "pipeline": pipeline, "static_mode": True}
    )
    torch.manual_seed(0)
    plain = kind()
    ours = copy.deepcopy(plain)
    model = smp.DistributedModel(ours, average_grads_across_microbatches=False)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    calls = 0

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return function(model, x, y, model.backward)

    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = [torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator) for _ in range(2)]
        before(plain, number)
        before(ours, number)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        expected = [
            function(plain, x, y, lambda value, gradient=None: value.backward(gradient))
            for x, y in zip(*[tensor.clone().chunk(MICROBATCHES) for tensor in batch], strict=True)
        ]
        found = step(model, *batch)
        for output, wanted in zip(
            found if isinstance(found, tuple) else (found,),
            zip(*expected, strict=True) if isinstance(expected[0], tuple) else (expected,),
            strict=True,
        ):
            assert [float(part) for part in output.outputs] == [float(part) for part in wanted], number
        optimizer.step()
        plain_optimizer.step()
        for (key, value), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, other), (number, key)
    # The first step partitions, the second is recorded.
    assert (calls == 2 * MICROBATCHES) == is_replayed


def test_a_buffer_bound_anew_is_refused() -> None:
    class Rebinds(_Net):
        def around(self, x: Tensor) -> Any:
            self.scale = self.scale * 0.9 + x.detach().mean() * 0.1
            return self.scale

    smp.init_in_memory({"partitions": 2, "microbatches": 2, "static_mode": True})
    model = smp.DistributedModel(Rebinds())
    step = smp.step(lambda model, x: model(x).sum())
    with torch.no_grad():
        step(model, torch.ones(2, WIDTH))
        with pytest.raises(smp.SMPError, match=r"static_mode: True.*binds the buffer scale"):
            step(model, torch.ones(2, WIDTH))


@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_clearing_gradients_in_the_step_is_refused(what: str) -> None:
    smp.init_in_memory({"partitions": 2, "microbatches": 1, "static_mode": True})
    model = smp.DistributedModel(_Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        (optimizer if what == "optimizer" else model).zero_grad()
        loss = model(x).sum()
        model.backward(loss)
        return loss

    if what == "model":
        step(model, torch.ones(2, WIDTH))  # which partitions
    with pytest.raises(smp.SMPError, match=r"static_mode: True"):
        step(model, torch.ones(2, WIDTH))


def test_what_is_recorded_every_time_is_said() -> None:
    smp.init_in_memory({"partitions": 2, "microbatches": 1, "static_mode": True})
    model = smp.DistributedModel(_Net())

    @smp.step
    def step(model: Any, x: Tensor) -> Any:
        return (model(x) * torch.vmap(torch.square)(x)).sum()

    with torch.no_grad():
        step(model, torch.ones(2, WIDTH))
        with pytest.warns(UserWarning, match=r"recorded every time: it uses a tensor of shape \[2, 4\]"):
            step(model, torch.ones(2, WIDTH))
