"""``static_mode``: the step is recorded once, and every later batch gives the plain model's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
