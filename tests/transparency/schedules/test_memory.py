"""What stays alive: nothing of a step after it, no more microbatches in flight than 1F1B allows,
and on
each rank no parameters but its own."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import smp_lite as smp
from smp_lite.record.parameters.away import is_away
from tests.harness import run_distributed
from tests.models.layers import WIDTH, Chain, regression_batch
from tests.transparency.conftest import OpenSession


class Hold(torch.autograd.Function):
    """The identity; saves a tensor for a backward that does not need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Watched(nn.Module):
    """Notes at each real run how many microbatches it keeps tensors of, and its activations weakly.

    A module that notes anything on itself is run where it is called, one torch function after another; this
    one is to stay a call that runs later. So it notes on a logger, whose attributes nobody takes for the
    module's state, and not on fake tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.notes: Any = logging.Logger("notes")
        self.notes.saved, self.notes.alive_at_call, self.notes.activations = [], [], []

    def forward(self, x: Tensor) -> Tensor:
        saved = torch.zeros(1)
        output = Hold.apply(self.linear(x), saved)
        if not isinstance(x, FakeTensor):
            notes = self.notes
            notes.saved.append(weakref.ref(saved))
            notes.alive_at_call.append(self.num_alive())
            notes.activations += [weakref.ref(x), weakref.ref(output)]
        return output

    def num_alive(self) -> int:
        self.notes.saved[:] = [reference for reference in self.notes.saved if reference() is not None]
        return len(self.notes.saved)


def train(module: nn.Module, num_steps: int = 2, num_samples: int = 16) -> list[weakref.ref[Tensor]]:
    """Trains; returns weak references to what the step function and the modules saw."""
    model = smp.DistributedModel(module)
    seen: list[weakref.ref[Tensor]] = []

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        doubled = output * 2
        seen.extend(weakref.ref(tensor) for tensor in (output, doubled))
        loss = doubled.square().mean()
        model.backward(loss)
        return loss

    for _ in range(num_steps):
        step(model, regression_batch(num_samples)["x"])
    for part in module.modules():
        seen += part.notes.activations if isinstance(part, Watched) else []
    return seen


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_nothing_of_a_step_stays_alive(pipeline: str, open_session: OpenSession) -> None:
    open_session(3, pipeline=pipeline, microbatches=8)
    module = nn.Sequential(*(Watched() for _ in range(3)))
    seen = train(module)
    gc.collect()
    assert len(seen) > 100
    assert [reference() for reference in seen if reference() is not None] == []
    assert [part.num_alive() for part in module] == [0, 0, 0]


@pytest.mark.parametrize(
    ("parameters", "in_flight"),
    [
        ({"pipeline": "interleaved"}, [3, 2, 1]),
        ({"pipeline": "interleaved", "active_microbatches": 2}, [2, 2, 1]),
        ({"pipeline": "interleaved", "active_microbatches": 1}, [1, 1, 1]),
        ({"pipeline": "simple"}, [8, 8, 8]),
    ],
    ids=str,
)
def test_microbatches_in_flight(
    parameters: dict[str, Any], in_flight: list[int], open_session: OpenSession
) -> None:
    open_session(3, microbatches=8, **parameters)
    module = nn.Sequential(*(Watched() for _ in range(3)))
    train(module)
    assert [max(part.notes.alive_at_call) for part in module] == in_flight


def test_a_failed_step_leaves_nothing(open_session: OpenSession) -> None:
    open_session(2)
    module = nn.Sequential(Watched(), Watched())
    model = smp.DistributedModel(module)
    seen: list[weakref.ref[Tensor]] = []

    @smp.step
    def step(model: Any, x: Tensor, limit: int) -> Tensor:
        output = model(x)
        seen.append(weakref.ref(output))
        output.sum().item()
        if len(seen) == limit:
            raise KeyError("the user's own")
        return output

    x = regression_batch(8)["x"]
    with pytest.raises(KeyError, match="the user's own"):
        step(model, x, 3)
    gc.collect()
    assert len(seen) == 3
    assert [reference() for reference in seen if reference() is not None] == []
    assert [part.num_alive() for part in module] == [0, 0]
    seen.clear()
    assert step(model, x, -1).concat().shape == (8, WIDTH)


def memory_on_rank() -> tuple[dict[str, bool], int, int]:
    """(parameter -> on this rank, microbatches held after a step, activations alive after it)."""
    smp.init()
    module = nn.Sequential(*(Watched() for _ in range(smp.state.num_stages)))
    seen = train(module)
    gc.collect()
    here = {name: not is_away(parameter) for name, parameter in module.named_parameters()}
    alive = sum(reference() is not None for reference in seen)
    return here, sum(part.num_alive() for part in module), alive


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_memory_of_each_rank(num_ranks: int) -> None:
    found = run_distributed(
        "tests.transparency.schedules.test_memory:memory_on_rank",
        num_ranks,
        parameters={"partitions": num_ranks, "microbatches": 8},
    )
    for name in found[0][0]:
        assert sum(here[name] for here, _, _ in found) == 1, name
    assert [sum(here.values()) for here, _, _ in found] == [2] * num_ranks
    assert [(held, alive) for _, held, alive in found] == [(0, 0)] * num_ranks


@pytest.mark.host
def test_one_process_keeps_all_parameters(open_session: OpenSession) -> None:
    open_session(3)
    module = Chain()
    train(module)
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_nothing_of_a_model_stays_alive_after_reset(open_session: OpenSession) -> None:
    open_session(2)
    model = smp.DistributedModel(Chain())

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward((model(x) - target).square().mean())

    step(model, *regression_batch(8).values())
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    assert held
    del model
    smp.reset()
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
