"""What an optimizer keeps, against what a real one keeps after real steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from smp_lite.preview.optimizer_memory import optimizer_memory

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    "nadam": torch.optim.NAdam,
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_that_of_a_real_optimizer(name: str) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    found = optimizer_memory(optimizer, list(model.parameters()))
    assert not any(optimizer.state.values())
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 200)).sum().backward()
        optimizer.step()
    assert found.state == state_bytes(optimizer)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_step_of_adamw_needs_twice_its_largest_parameter() -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer_memory(optimizer, list(model.parameters())).running == 2 * 200 * 300 * 4


def test_only_parameters_with_a_gradient_count() -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    found = optimizer_memory(optimizer, [model[1].weight])
    assert found.state == 300 * 10 * 4


def test_parameters_without_memory_will_do_and_hooks_stay_silent() -> None:
    with torch.device("meta"):
        layer = nn.Linear(100_000, 100_000)
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    assert optimizer_memory(optimizer, list(layer.parameters())).state > 2 * 4 * 10**10


def test_what_wants_a_closure_raises() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="closure"):
        optimizer_memory(torch.optim.LBFGS(layer.parameters()), list(layer.parameters()))
