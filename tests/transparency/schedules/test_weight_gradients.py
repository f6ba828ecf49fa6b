"""Gradients of parameters as actions of their own: what is split, what stays whole, and every bit of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smp_lite as smp
from smp_lite.errors import SMPError
from tests.harness import run_distributed
from tests.models import Batch
from tests.models.layers import WIDTH, Chain, MLPBlock
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal
from tests.transparency.schedules.weight_gradients import (
    BATCH,
    Around,
    Check,
    Unseen,
    all_but_norms,
    own_names,
    train,
)


def test_linear_layers_are_split(check: Check) -> None:
    assert check(Chain) == all_but_norms(Chain)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Conv1d(4, 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.two(x.view(len(x), 1, 4, -1)))
        return self.one(y.flatten(2)).mean(1).view(x.shape)


def test_convolutions_are_split(check: Check) -> None:
    found = check(lambda: Around(Convolutions))
    assert own_names(found) == {"two.weight", "two.bias", "one.weight"}


class Addmm(nn.Module):
    """As the linear layers of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view(x.shape)


def test_addmm_is_split(check: Check) -> None:
    def build() -> nn.Module:
        return Around(Addmm)

    assert check(build) == all_but_norms(build)


class Words(nn.Module):
    """An embedding, whose input wants no gradient, and a head that may be tied to it."""

    def __init__(self, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0, sparse=sparse)
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x += 1  # what an embedding gives may be changed in place
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def words() -> Batch:
    return {"x": torch.arange(8 * 6).view(8, 6) % 11, "target": torch.arange(8 * 6).view(8, 6) % 7}


def train_words(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["target"].flatten())
    backward(loss)
    return loss


def test_embedding_is_split(check: Check) -> None:
    assert check(Words, batch=words(), function=train_words) == all_but_norms(Words)


def test_tied_weights_stay_whole(check: Check) -> None:
    def build() -> nn.Module:
        return Words(tied=True)

    found = check(build, batch=words(), function=train_words)
    assert smp.state.model.runtime is not None
    # Each visit could be split by itself; in a list they are not.
    assert all_but_norms(build) - {"embedding.weight"} <= found
    spy = [set(e.weights.deferred) for e in smp.state.model.runtime.executors.values() if e.weights]
    assert spy == [set(), set()]  # nothing between lists


@pytest.mark.unpretended
def test_sparse_embedding_stays_whole(check: Check) -> None:
    def densify(weight: Tensor) -> None:
        weight.grad = weight.grad.to_dense()  # what can be compared

    def build() -> nn.Module:
        model = Words(sparse=True)
        model.embedding.weight.register_post_accumulate_grad_hook(densify)
        return model

    assert "embedding.weight" not in check(build, batch=words(), function=train_words)


class Twice(nn.Module):
    """One linear layer called twice, and another whose weight is also used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(F.gelu(self.twice(x)))
        return self.plain(self.beside(x) + self.beside.weight.sum(0))


def test_parameters_used_twice_stay_whole(check: Check) -> None:
    found = check(lambda: Around(Twice))
    assert own_names(found) == {"plain.weight", "plain.bias"}


class WithUnseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Unseen.apply(self.linear(x), self.linear.weight)


def test_a_second_use_that_is_not_seen(check: Check) -> None:
    found = check(lambda: Around(WithUnseen))
    assert all("weight" not in name for name in found)


class Gated(nn.Module):
    """Closed in the first step: all gradients inside are zeros."""

    def __init__(self, inside: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))
        self.inside = inside()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.flip(-1)).view(-1, 1, WIDTH)
        return self.gate * self.inside(y).abs().mean(1).view(x.shape)


def open_gates(model: nn.Module) -> None:
    for block in model.blocks:
        block.gate.data.fill_(0.5)


@pytest.mark.parametrize(
    "inside",
    [
        lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
        lambda: nn.Conv1d(1, 2, 3, padding=1, dtype=torch.complex64),
    ],
)
def test_complex_numbers(inside: Callable[[], nn.Module], check: Check) -> None:
    rounds = [Round(train, BATCH), *[Round(train, BATCH, before=open_gates)] * 2]
    assert check(lambda: Around(lambda: Gated(inside)), *rounds) == set()


def test_autocast_stays_whole(check: Check) -> None:
    def function(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["x"])
        loss = F.mse_loss(output.float(), batch["target"])
        backward(loss)
        return loss

    assert check(Chain, function=function) == set()


class Checkpointed(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("block", [Checkpointed, Reentrant])
def test_checkpointed_stays_whole(block: type[nn.Module], check: Check) -> None:
    assert check(lambda: Around(block)) == set()


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.linear)(x)


def test_function_transforms(check: Check) -> None:
    check(lambda: Around(Mapped))


class Reused(nn.Module):
    """Changes in place what its linear layer has read, when the backward of that is over for others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = self.linear(y)
        y.mul_(3)
        return z


def test_changed_inputs_are_an_error(open_session: OpenSession) -> None:
    plain = Around(Reused)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(BATCH["x"]).sum().backward()
    open_session(2, "zigzag", pipeline="zero_bubble")
    with pytest.raises((RuntimeError, SMPError), match=r"in ?place"):
        assert_rounds_equal(lambda: copy.deepcopy(plain), [Round(train, BATCH)])


def test_replicas_and_buckets() -> None:
    """That the library listens for final gradients itself keeps no parameter whole."""
    found = run_distributed(
        "tests.transparency.schedules.weight_gradients:replicas",
        4,
        kwargs={"num_steps": 3},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "zero_bubble"},
    )
    assert [wrong for wrong, _, _ in found] == [[]] * 4
    assert all(num_buckets > 0 and num_calls > 0 for _, num_buckets, num_calls in found), found


class FlatGradients(Chain):
    """Gradients are views of one tensor, and so count their changes together."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        parameters = list(self.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, torch.zeros(sum(sizes)).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)


def test_gradients_that_are_views_of_one_tensor(check: Check) -> None:
    assert check(FlatGradients) == all_but_norms(Chain)


def test_gradients_that_become_views_of_one_tensor(check: Check) -> None:
    """As with ``gradient_as_bucket_view`` where gradients add up over steps."""

    def flat(module: nn.Module) -> None:
        module.__class__ = FlatGradients

    rounds = [Round(train, BATCH)] * 2
    assert check(Chain, *rounds, Round(train, BATCH, before=flat), *rounds) == all_but_norms(Chain)
