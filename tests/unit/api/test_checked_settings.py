"""An optimizer that comes to look at all parameters is refused then too, not only when it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import smp_lite as smp
from smp_lite.optim import checked_settings
from tests.api_support import batch, build, in_memory, train

REFUSED = "Limited over several partitions"


class Limited(torch.optim.Optimizer):
    """Plain descent, with a limit on the norm of all gradients in the group's settings or the optimizer's."""

    def __init__(self, params: Any, lr: float = 0.1, max_norm: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm, "steps": 0})
        self.limit = 0.0
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["steps"] += 1
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            limit = self.limit or group["max_norm"]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            factor = (limit / norm).clamp(max=1.0) if limit else 1.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * factor * parameter.grad)


@pytest.fixture(autouse=True)
def _two_partitions() -> None:
    in_memory(2)


@pytest.fixture(params=["wrapped", "bare"])
def made(request: pytest.FixtureRequest) -> tuple[Any, Any, Limited]:
    """A model that has trained a step, what is stepped, and the optimizer in it."""
    model = smp.DistributedModel(build())
    inner = Limited(model.parameters())
    optimizer = smp.DistributedOptimizer(inner) if request.param == "wrapped" else inner
    one_step(model, optimizer)
    return model, optimizer, inner


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    train(model, *batch())
    optimizer.step()


def in_group(optimizer: Limited) -> None:
    optimizer.param_groups[0]["max_norm"] = 0.01


def in_attribute(optimizer: Limited) -> None:
    optimizer.limit = 0.01


def in_loaded_state(optimizer: Limited) -> None:
    state = optimizer.state_dict()
    state["param_groups"][0]["max_norm"] = 0.01
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("change", [in_group, in_attribute, in_loaded_state])
def test_a_limit_that_is_set_later(made: tuple[Any, Any, Limited], change: Callable[[Any], None]) -> None:
    model, optimizer, inner = made
    one_step(model, optimizer)
    change(inner)
    with pytest.raises(smp.SMPError, match=REFUSED):
        one_step(model, optimizer)


def test_in_the_defaults_even_by_a_hook() -> None:
    """``FusedLAMB`` reads its limit there."""
    model = smp.DistributedModel(build())
    inner = smp.optimizers.FusedLAMB(model.parameters(), max_grad_norm=0)
    optimizer = smp.DistributedOptimizer(inner)
    one_step(model, optimizer)
    inner.register_step_pre_hook(lambda found, *_: found.defaults.update(max_grad_norm=0.5))
    one_step(model, optimizer)
    with pytest.raises(smp.SMPError, match="FusedLAMB over several partitions"):
        one_step(model, optimizer)


def test_what_it_counts_itself_and_rates_are_no_reason_to_try_it_again(
    made: tuple[Any, Any, Limited], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, inner = made
    tried: list[Any] = []
    monkeypatch.setattr(checked_settings, "check_optimizer", tried.append)
    for number in range(3):
        inner.param_groups[0]["lr"] = 0.1 / (number + 1)
        one_step(model, optimizer)
    assert inner.steps == inner.param_groups[0]["steps"] == 4
    assert not tried
    inner.param_groups[0]["max_norm"] = 0.01
    one_step(model, optimizer)
    one_step(model, optimizer)
    assert tried == [inner]
