"""Scripts that put functions of their own in the places of torch's, which call these."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.errors import SMPError
from tests.models.layers import WIDTH, Chain, MLPBlock
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal
from tests.transparency.schedules.weight_gradients import BATCH, Around, Check, train, zigzag_step


class Normed(Chain):
    """With functions of torch's between the blocks, that are written in Python."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.layer_norm(x + F.softmax(block(x), -1), (WIDTH,))
        return self.head(x / self.head(x).norm())


PATCHED = [(F, "mse_loss"), (F, "softmax"), (F, "layer_norm"), (F, "linear"), (torch.Tensor, "norm")]


def _around(holder: Any, name: str) -> Any:
    """A function that does something after torch's, which it calls."""
    own = getattr(holder, name)
    return mock.patch.object(holder, name, lambda *args, **kwargs: own(*args, **kwargs) * 1.5)


@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize(("holder", "name"), PATCHED, ids=[name for _, name in PATCHED])
def test_they_run_once(holder: Any, name: str, pipeline: str, open_session: OpenSession) -> None:
    open_session(2, "zigzag", pipeline=pipeline)
    with _around(holder, name):
        assert_rounds_equal(Normed, [Round(train, BATCH)] * 3)


class Quantized(nn.Module):
    """Exchanges the function of layers for the time of their calls, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MLPBlock()
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return self.block(x)
        with _around(F, "linear"):
            return self.block(x)


def _turned_on(model: nn.Module) -> None:
    for block in model.blocks:
        block.is_on = True


def test_within_a_layer_that_has_been_split(check: Check) -> None:
    plain = Round(train, BATCH)
    check(lambda: Around(Quantized), plain, plain, Round(train, BATCH, before=_turned_on), plain)


def test_a_method_of_tensors_for_the_time_of_a_call(open_session: OpenSession) -> None:
    open_session(2, "zigzag")
    _, step = zigzag_step(Around(MLPBlock))
    step(BATCH)

    def patched(model: Any, batch: Any) -> Any:
        with mock.patch.object(torch.Tensor, "square", torch.Tensor.abs):
            return model(batch["x"])

    @smp.step
    def once(model: Any, batch: Any) -> Any:
        return model(batch["x"]), patched(model, batch)

    with pytest.raises(SMPError, match=r"exchanges methods of torch\.Tensor"):
        once(smp.state.model, BATCH)
