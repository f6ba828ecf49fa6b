"""Gradients of parameters as actions of their own, where later steps differ from the first one."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp_lite.errors import SMPError
from smp_lite.runtime.weights.rules import RULES
from tests.models import Batch
from tests.models.layers import WIDTH, Chain
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal
from tests.transparency.schedules.weight_gradients import (
    BATCH,
    Around,
    Check,
    Unseen,
    all_but_norms,
    own_names,
    split_names,
    train,
    zigzag_step,
)


class Late(nn.Module):
    """Uses its weight in a second way where something says so of which no recording knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return Unseen.apply(y, self.linear.weight) if "MORE" in os.environ else y


def test_a_second_use_that_comes_later_is_an_error(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session(2, "zigzag", pipeline="zero_bubble")
    _, step = zigzag_step(Around(Late))
    step(BATCH)
    monkeypatch.setenv("MORE", "1")
    with pytest.raises(SMPError, match=r"linear\.weight.*set pipeline to 'interleaved'"):
        step(BATCH)


class Penalised(nn.Module):
    """A second use of a weight, whose gradient is zero for now."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.strength * self.linear.weight.square().sum()


def test_a_second_use_that_counts_later(check: Check) -> None:
    def count(model: nn.Module) -> None:
        for block in model.blocks:
            block.strength = 0.1

    found = check(lambda: Around(Penalised), Round(train, BATCH), *[Round(train, BATCH, before=count)] * 2)
    assert own_names(found) <= {"linear.bias"}


class PenalisedElsewhere(Chain):
    """The weight of one stage's block is used by another stage, and what that gives is zero for now."""

    strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        own, other = self.blocks[3].contract.weight, self.blocks[0].expand.weight.detach()
        return super().forward(x) + self.strength * (other @ own).sum()


@pytest.mark.parametrize("later", [0.0, 0.1])
def test_a_use_by_another_stage_that_counts_later(later: float, open_session: OpenSession) -> None:
    def count(model: nn.Module) -> None:
        model.strength = later

    open_session(2, pipeline="zero_bubble")
    rounds = [Round(train, BATCH), *[Round(train, BATCH, before=count)] * 2]
    assert_rounds_equal(PenalisedElsewhere, rounds)


def test_frozen_and_trained_again(check: Check) -> None:
    def freeze(flag: bool) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            model.blocks[1].requires_grad_(flag)
            model.blocks[3].expand.weight.requires_grad_(flag)
            model.blocks[2].norm.bias.requires_grad_(not flag)

        return change

    flags = (True, True, False, False, True, True)
    check(Chain, *[Round(train, BATCH, before=freeze(flag)) for flag in flags])


def test_autocast_from_the_second_step_on(check: Check) -> None:
    def function(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["x"])
        loss = F.mse_loss(output.float(), batch["target"])
        backward(loss)
        return loss

    check(Chain, *[Round(f, BATCH) for f in (train, train, function, train, function)])


def test_numbers_that_are_none_at_first(open_session: OpenSession) -> None:
    """As with a loss scale that is too large."""
    open_session(2, "zigzag", pipeline="zero_bubble")
    model, step = zigzag_step(Chain())
    step({**BATCH, "x": BATCH["x"] * float("inf")})
    assert split_names(model) == all_but_norms(Chain)


class Scaled(nn.Module):
    """A branch whose hook changes in place a gradient that the other branch has got too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        other = x.view(x.shape)
        if self.is_on:
            other.register_hook(lambda gradient: gradient.mul_(3))
        return other + self.linear(x)


def test_gradients_changed_in_place(open_session: OpenSession) -> None:
    open_session(2, "zigzag", pipeline="zero_bubble")
    module = Around(Scaled)
    _, step = zigzag_step(module)
    step(BATCH)
    step(BATCH)
    for block in module.blocks:
        block.is_on = True
    with pytest.raises(SMPError, match=r"linear\.weight.*changed in place"):
        step(BATCH)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_patched_class(is_late: bool, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tools that add adapters, or quantize, do it."""
    own = nn.Linear.forward

    def patch(module: nn.Module) -> None:
        monkeypatch.setattr(nn.Linear, "forward", lambda self, input: own(self, input) * 1.5)

    plain, patched = Round(train, BATCH), Round(train, BATCH, before=patch)
    check(Chain, *([plain, plain] if is_late else []), patched, patched)


class SetsData(nn.Module):
    """As constraints on weights are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        return self.linear(x)


def test_weights_that_are_set_in_a_forward(check: Check) -> None:
    def grow(model: nn.Module) -> None:
        for block in model.blocks:
            block.linear.weight.data.mul_(1.5)

    assert check(lambda: Around(SetsData), *[Round(train, BATCH, before=grow)] * 3)


class Branching(nn.Module):
    """Goes another way for some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.mean() > 0 else self.other(self.one(x))


def test_branches_on_data(check: Check) -> None:
    turned = [{**BATCH, "x": BATCH["x"].roll(step, 0) - 0.02 * step} for step in range(4)]
    check(lambda: Around(Branching), *[Round(train, batch) for batch in turned])


class Dropping(Chain):
    """Other blocks of a stage in other microbatches, and now and then as many."""

    def __init__(self) -> None:
        super().__init__(6)

    def forward(self, x: Tensor) -> Tensor:
        for index in ((0, 2, 4), (0, 2), (2, 4))[int(3 * torch.rand(()))]:
            x = x + self.blocks[index](x)
        return self.head(self.blocks[1](x))


def test_other_layers_in_other_microbatches(check: Check) -> None:
    check(Dropping, *[Round(train, BATCH)] * 8)


class Shut(nn.Module):
    """Nothing reaches the layers behind the gate in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.layer(x)


def _opened(module: nn.Module) -> None:
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, Shut):
                part.gate.fill_(0.5)


def _wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[F.linear]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        call = rule(*args, **kwargs)
        if call is None:
            return None

        def run(stand_in: Callable[[Any], Any]) -> Any:
            output, gradients = call.run(stand_in)
            return output, lambda gradient: tuple(2 * each for each in gradients(gradient))

        return call._replace(run=run)

    monkeypatch.setitem(RULES, F.linear, wrong)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_zeros_show_nothing_of_a_rule(is_wrong: bool, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rule makes zeros of zeros as well; the right one is learned once there is something to see."""
    if is_wrong:
        _wrong_rule(monkeypatch)
    closed = Round(train, BATCH)
    rounds = [closed, closed, Round(train, BATCH, before=_opened), closed, closed, closed]
    split = check(lambda: nn.Sequential(Shut(), Shut()), *rounds)
    layers = {f"{number}.layer.{name}" for number in (0, 1) for name in ("weight", "bias")}
    assert split == (set() if is_wrong else layers)


def test_of_zeros_alone_nothing_is_split(check: Check) -> None:
    assert check(lambda: nn.Sequential(Shut(), Shut())) == set()


class Reminded(Shut):
    """Has a second layer for what the model was given, which wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.of_raw = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, raw: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.of_raw(raw)


class AllReminded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reminded() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y, x)
        return y


def test_a_layer_on_the_batch_beside_one_that_has_shown_zeros(check: Check) -> None:
    """While the one is still being learned, in one microbatch only, the other is split in all."""
    split = check(AllReminded, *[Round(train, BATCH)] * 6)
    assert split == {f"blocks.{i}.of_raw.{name}" for i in range(4) for name in ("weight", "bias")}


def _frozen(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("of_raw.bias" not in name)


@pytest.mark.parametrize("static_mode", [False, True])
def test_a_parameter_that_wants_no_gradient_while_others_are_learned(static_mode: bool, check: Check) -> None:
    later = Round(train, BATCH, before=_frozen)
    check(AllReminded, *[Round(train, BATCH)] * 2, *[later] * 4, static_mode=static_mode)


class LooksAtItsLayers(nn.Module):
    """Asks what the forwards of its layers take, and computes with copies of these layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layer, self.convolution):
            names = tuple(inspect.signature(layer.forward).parameters)
            x = layer(x[:, None]).squeeze(1) * (names == ("input",)) * inspect.ismethod(layer.forward)
            other = copy.deepcopy(layer).requires_grad_(False)
            with torch.no_grad():
                other.weight.mul_(3)
            x = x + pickle.loads(pickle.dumps(other))(x[:, None]).squeeze(1) + other(x[:, None]).squeeze(1)
        return x


def test_layers_that_are_looked_at_and_copied_in_a_forward(check: Check) -> None:
    def build() -> nn.Module:
        return Around(LooksAtItsLayers)

    assert check(build) == all_but_norms(build)
