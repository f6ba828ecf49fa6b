"""``static_mode``: the step is recorded once, and every later batch gives the plain model's numbers."""

from __future__ import annotations

import argparse
import copy
import math
import operator
import random
from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.models import CASES, plain_step
from tests.models.layers import WIDTH, Chain, regression_batch


def _start(**parameters: Any) -> None:
    smp.init_in_memory({"partitions": 3, "microbatches": 4, "static_mode": True, **parameters})


def _slices(batch: dict[str, Any], start: int, size: int) -> dict[str, Any]:
    return {
        key: value[start : start + size] if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "gpt_tied",
        "attention_mask",
        "unet",
        "batchnorm",
        "multi_input",
        "hooks",
        "lstm",
    ],
)
def test_replayed_steps_equal_the_plain_model(name: str) -> None:
    case = CASES[name]
    _start()
    torch.manual_seed(0)
    plain = case.build()
    torch.manual_seed(0)
    model = smp.DistributedModel(case.build())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    calls = 0

    @smp.step
    def train(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = case.loss_of(case.forward_loss(model, batch))
        model.backward(loss)
        return loss

    batch = case.batch(40)
    for step in range(5):
        part = _slices(batch, 8 * step, 8)
        plain_optimizer.zero_grad()
        expected = plain_step(case, plain, part, 4)
        plain_optimizer.step()
        optimizer.zero_grad()
        losses = train(model, part)
        optimizer.step()
        for loss, wanted in zip(losses.outputs, expected.losses, strict=True):
            torch.testing.assert_close(loss, torch.as_tensor(wanted), rtol=1e-6, atol=1e-6)
    # The first step partitions, the second is recorded, the others are replayed.
    assert calls == 2 * 4


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))


def test_tensors_made_from_the_batch_are_made_again() -> None:
    _start(microbatches=2)
    model = smp.DistributedModel(_tiny())

    @smp.step
    def total(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any]:
        x.add_(1)  # in place, on the batch
        weight = torch.where(y > 0, y, torch.zeros_like(y))
        return (model(x) * weight).sum(), weight

    with torch.no_grad():
        for step in range(4):
            x, y = (
                torch.full((4, 4), float(step)),
                torch.tensor([[1.0], [-1.0], [2.0], [float(step)]]),
            )
            found, weight = total(model, x.clone(), y)
            expected = (_whole(model)(x + 1) * y.clamp(min=0)).sum()
            torch.testing.assert_close(found.reduce_sum(), expected)
            torch.testing.assert_close(weight.concat(), y.clamp(min=0))


def _whole(model: Any) -> nn.Module:
    whole = _tiny()
    whole.load_state_dict(model.state_dict())
    return whole


def test_another_shape_or_mode_is_recorded_anew() -> None:
    _start(microbatches=2)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.ReLU()))
    calls = 0

    @smp.step
    def forward(model: Any, x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return model(x)

    with torch.no_grad():
        for size, training in [
            (4, True),
            (4, True),
            (4, True),
            (8, True),
            (8, True),
            (8, False),
            (8, False),
        ]:
            model.train(training)
            assert forward(model, torch.ones(size, 4)).concat().shape == (size, 1)
    assert calls == 2 * 4  # partition, then three kinds


@pytest.mark.parametrize("fault", ["item", "input_item", "rand"])
def test_what_a_replay_would_not_repeat_is_refused(fault: str) -> None:
    _start(microbatches=2)
    model = smp.DistributedModel(_tiny())

    @smp.step
    def forward(model: Any, x: torch.Tensor) -> Any:
        if fault == "input_item" and x.sum().item() > 100:
            return None
        out = model(x).sum()
        if fault == "item":
            out = out * float(out.item())
        return out * torch.rand(()) if fault == "rand" else out

    with torch.no_grad():
        forward(model, torch.ones(4, 4))  # not kept: the model is partitioned in the middle of it
        with pytest.raises(smp.SMPError, match="static_mode"):
            forward(model, torch.ones(4, 4))


def test_a_gradient_that_is_written_between_steps() -> None:
    """Given to ``model.backward``: a replay reads it as it is by then, like other tensors of the script."""
    smp.init_in_memory({"partitions": 2, "microbatches": 4, "static_mode": True})
    torch.manual_seed(0)
    plain = Chain()
    torch.manual_seed(0)
    model = smp.DistributedModel(Chain(), average_grads_across_microbatches=False)
    gradient = torch.ones(2, WIDTH)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        model.backward(output, gradient)
        return output

    batch = regression_batch(8)["x"]
    for number in range(5):
        gradient.fill_(1.0 + number)
        plain.zero_grad()
        model.zero_grad()
        for x in batch.chunk(4):
            plain(x).backward(gradient)
        step(model, batch)
        for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad), number


class _Scaled(nn.Module):
    """Its own code runs while a step is recorded, and what that reads may change between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_tiny(), _tiny()])
        self.factor = 1.0
        self.settings = ChainMap({"factor": 1.0})
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x) * self.factor * FACTORS[0] * self.settings["factor"] * _default() + self.shift
        x = x * SCRIPT.factor * SCHEDULER.get_last_lr()[0] * SCALER.get_scale()
        return (x if self.parts[1].training else 2 * x) + self.parts[1][0](x.expand(-1, 4)).sum(
            -1, keepdim=True
        )


FACTORS = [1.0]
SCRIPT = argparse.Namespace(factor=1.0)
SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)
SCALER = torch.amp.GradScaler("cpu", init_scale=1.0)


def _default(factor: float = 1.0) -> float:
    return factor


def _other_default(model: Any) -> None:
    _default.__defaults__ = (7.0,)


def _reversed(model: Any) -> None:
    model.parts = nn.ModuleList(list(model.parts)[::-1])


CHANGES: dict[str, Any] = {
    "attribute": lambda model: setattr(model, "factor", 3.0),
    "buffer": lambda model: setattr(model, "shift", torch.ones(1)),
    "mode": lambda model: model.parts[1].eval(),
    "frozen": lambda model: model.parts[0].requires_grad_(False),
    "parts": _reversed,
    "hook": lambda model: model.register_forward_hook(lambda module, args, result: result * 2),
    "chained dicts": lambda model: model.settings.maps[0].update(factor=4.0),
    "default": _other_default,
    "global": lambda model: FACTORS.__setitem__(0, 5.0),
    "script argument": lambda model: setattr(SCRIPT, "factor", 2.0),
    "scheduler": lambda model: SCHEDULER._last_lr.__setitem__(0, 0.5),
    "loss scale": lambda model: setattr(SCALER, "_init_scale", 4.0),
    "autocast": lambda model: None,
}
OF_THE_SCRIPT = ("default", "global", "script argument", "scheduler", "loss scale")


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_recorded_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTORS", [1.0])
    monkeypatch.setattr(_default, "__defaults__", (1.0,))
    monkeypatch.setattr(SCRIPT, "factor", 1.0)
    monkeypatch.setattr(SCHEDULER, "_last_lr", [1.0])
    monkeypatch.setattr(SCALER, "_init_scale", 1.0)
    smp.init_in_memory({"partitions": 2, "microbatches": 2, "static_mode": True})
    torch.manual_seed(0)
    plain = _Scaled()
    ours = copy.deepcopy(plain)
    model = smp.DistributedModel(ours)
    calls = 0

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        if number == 5:
            CHANGES[name](ours)
            if name not in OF_THE_SCRIPT:
                CHANGES[name](plain)
        x = torch.randn(4, 4, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast" and number >= 5):
            losses = step(model, x)
            for part in x.chunk(2):
                (plain(part).square().mean() / 2).backward()
            expected = [plain(part).square().mean() for part in x.chunk(2)]
        assert [float(loss) for loss in losses.outputs] == [float(loss) for loss in expected]
        for (key, own), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), key
            assert own.grad is None or torch.equal(own.grad, other.grad), key
        model.zero_grad()
        plain.zero_grad()
    assert calls == 3 * 2  # partitioned, recorded, recorded anew


class _Settings:
    def __init__(self) -> None:
        self.factor = 1.0


SETTINGS = _Settings()
ARRAY = numpy.ones(2)
SCALARS = [torch.tensor(1.0), torch.tensor(3.0)]


def _settings(number: int) -> _Settings:
    SETTINGS.factor = 3.0 if number > 4 else 1.0
    return SETTINGS


def _array(number: int) -> Any:
    ARRAY[1] = 3.0 if number > 4 else 1.0
    return ARRAY


class _Given(dict[str, Tensor]):
    """A nest that gets an attribute later."""


def _given(number: int) -> Any:
    given = _Given(scale=SCALARS[0])
    if number > 4:
        given.factor = 3.0  # type: ignore[attr-defined]
    return given


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "attribute of a nest": (_given, lambda given: given["scale"] * getattr(given, "factor", 1.0)),
    "object": (_settings, lambda given: given.factor),
    "array": (_array, lambda given: float(given[1])),
    "sign of zero": (
        lambda number: -0.0 if number > 4 else 0.0,
        lambda given: math.copysign(1.0, given),
    ),
    "one tensor twice": (
        lambda number: (SCALARS[0], SCALARS[number > 4]),
        lambda given: given[0] * 2 + given[1],
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_changes_is_seen(name: str) -> None:
    make, use = ARGUMENTS[name]
    smp.init_in_memory({"partitions": 2, "microbatches": 2, "static_mode": True})
    torch.manual_seed(0)
    plain = Chain()
    ours = copy.deepcopy(plain)
    model = smp.DistributedModel(ours)
    calls = 0

    @smp.step(non_split_inputs=["given"])
    def step(model: Any, x: Tensor, given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return model(x).square().mean() * use(given)

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number in range(8):
            x = torch.randn(4, WIDTH, generator=generator)
            given = make(number)
            losses = step(model, x, given)
            expected = [plain(part).square().mean() * use(given) for part in x.chunk(2)]
            assert [float(loss) for loss in losses.outputs] == [float(loss) for loss in expected], number
    assert calls == 3 * 2  # partitioned, recorded, recorded anew


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_numbers_that_python_or_numpy_draw_are_refused(draw: Any) -> None:
    _start(microbatches=2)
    model = smp.DistributedModel(_tiny())

    @smp.step
    def forward(model: Any, x: torch.Tensor) -> Any:
        return model(x) * draw()

    with torch.no_grad():
        forward(model, torch.ones(4, 4))
        with pytest.raises(smp.SMPError, match="draws random numbers itself"):
            forward(model, torch.ones(4, 4))


_taken: Any = None


@dataclass
class _Numbers:
    taken: Any


@pytest.mark.parametrize(
    "wrapped",
    [
        iter,
        lambda numbers: (number for number in numbers),
        lambda numbers: iter(torch.utils.data.DataLoader(numbers, batch_size=None)),
    ],
    ids=["iter", "generator", "loader"],
)
@pytest.mark.parametrize(
    ("where", "of"),
    [
        (lambda taken: taken, lambda found: found),
        (lambda taken: [taken], operator.itemgetter(0)),
        (lambda taken: {"numbers": taken}, operator.itemgetter("numbers")),
        (_Numbers, operator.attrgetter("taken")),
    ],
    ids=["global", "list", "dict", "attribute"],
)
def test_a_step_that_takes_from_an_iterator_is_refused(
    wrapped: Any, where: Any, of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(microbatches=2)
    model = smp.DistributedModel(_tiny())
    monkeypatch.setitem(globals(), "_taken", where(wrapped(torch.arange(1.0, 13.0))))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> Any:
        return model(x).sum().detach() * 0 + next(of(_taken))

    with torch.no_grad():
        step(model, torch.ones(4, 4))
        with pytest.raises(smp.SMPError, match=r"static_mode: True, .* may take from _taken\S*, a "):
            step(model, torch.ones(4, 4))
    assert float(next(of(_taken))) == 3.0  # nothing was taken
