"""Gradients of parameters as actions of their own: what is split, what stays whole, and every bit of both."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smp_lite as smp
from smp_lite.errors import SMPError
from smp_lite.runtime.weights.rules import RULES
from tests.models import Batch
from tests.models.layers import WIDTH, Chain, MLPBlock, regression_batch
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal

BATCH = regression_batch(8)


def train(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["target"])
    backward(loss)
    return loss


def split_names(model: smp.DistributedModel) -> set[str]:
    """The parameters that this process splits."""
    assert model.runtime is not None
    found = set()
    for executor in model.runtime.executors.values():
        assert executor.weights is not None
        found |= {model.runtime.placement.alias(p) for p in executor.weights.learned}
    return found


@pytest.fixture
def check(open_session: OpenSession) -> Callable[..., set[str]]:
    """``check(build)`` compares three steps with plain torch, and gives the names of what was split."""

    def run(
        build: Callable[[], nn.Module],
        *rounds: Round,
        batch: Batch = BATCH,
        function: Callable[..., Any] = train,
        **parameters: Any,
    ) -> set[str]:
        open_session(2, "zigzag", pipeline="zero_bubble", **parameters)
        assert_rounds_equal(build, rounds or [Round(function, batch)] * 3)
        return split_names(smp.state.model)

    return run


def all_but_norms(build: Callable[[], nn.Module]) -> set[str]:
    """A norm's gradients are made in one go."""
    return {name for name, _ in build().named_parameters() if ".norm." not in name}


def test_linear_layers_are_split(check: Callable[..., set[str]]) -> None:
    assert check(Chain) == all_but_norms(Chain)


class Around(nn.Module):
    """Blocks of one kind in the chain's places."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Conv1d(4, 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.two(x.view(len(x), 1, 4, -1)))
        return self.one(y.flatten(2)).mean(1).view(x.shape)


def test_convolutions_are_split(check: Callable[..., set[str]]) -> None:
    found = check(lambda: Around(Convolutions))
    assert {name.split(".", 2)[2] for name in found} == {"two.weight", "two.bias", "one.weight"}


class Addmm(nn.Module):
    """As the linear layers of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view(x.shape)


def test_addmm_is_split(check: Callable[..., set[str]]) -> None:
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


def test_embedding_is_split(check: Callable[..., set[str]]) -> None:
    assert check(Words, batch=words(), function=train_words) == all_but_norms(Words)


def test_tied_weights_stay_whole(check: Callable[..., set[str]]) -> None:
    def build() -> nn.Module:
        return Words(tied=True)

    found = check(build, batch=words(), function=train_words)
    assert smp.state.model.runtime is not None
    # Each visit could be split by itself; in a list they are not.
    assert all_but_norms(build) - {"embedding.weight"} <= found
    spy = [set(e.weights.deferred) for e in smp.state.model.runtime.executors.values() if e.weights]
    assert spy == [set(), set()]  # nothing between lists


def test_sparse_embedding_stays_whole(check: Callable[..., set[str]]) -> None:
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


def test_parameters_used_twice_stay_whole(check: Callable[..., set[str]]) -> None:
    found = check(lambda: Around(Twice))
    assert {name.split(".", 2)[2] for name in found} == {"plain.weight", "plain.bias"}


class Unseen(torch.autograd.Function):
    """Uses a weight where no function mode looks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), (gradient * x).sum().expand_as(weight)


class WithUnseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Unseen.apply(self.linear(x), self.linear.weight)


def test_a_second_use_that_is_not_seen(check: Callable[..., set[str]]) -> None:
    found = check(lambda: Around(WithUnseen))
    assert all("weight" not in name for name in found)


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
    module = Around(Late)
    model = smp.DistributedModel(module)
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index % 2)

    @smp.step
    def step(model: Any, batch: Batch) -> Any:
        return train(model, batch, model.backward)

    step(model, BATCH)
    monkeypatch.setenv("MORE", "1")
    with pytest.raises(SMPError, match=r"linear\.weight.*set pipeline to 'interleaved'"):
        step(model, BATCH)


class Hooked(Chain):
    """Hooks on parameters and on what a linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].expand.weight.register_hook(lambda gradient: 2 * gradient)
        for block in self.blocks:
            block.contract.register_forward_hook(self._double)
        for parameter in self.blocks[1].parameters():
            parameter.register_post_accumulate_grad_hook(self._halve)

    @staticmethod
    def _double(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: 2 * gradient)

    @staticmethod
    def _halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)


def test_hooks_see_what_they_always_see(check: Callable[..., set[str]]) -> None:
    found = check(Hooked)
    assert "blocks.0.expand.weight" not in found
    assert "blocks.1.expand.weight" not in found
    assert "blocks.2.expand.weight" in found


def test_a_hook_that_comes_later(check: Callable[..., set[str]]) -> None:
    def hook(model: nn.Module) -> None:
        model.blocks[2].expand.weight.register_hook(lambda gradient: gradient * 3)

    rounds = [Round(train, BATCH), Round(train, BATCH), Round(train, BATCH, before=hook), Round(train, BATCH)]
    assert check(Chain, *rounds) == all_but_norms(Chain)


def test_frozen_and_trained_again(check: Callable[..., set[str]]) -> None:
    def freeze(flag: bool) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            model.blocks[1].requires_grad_(flag)
            model.blocks[3].expand.weight.requires_grad_(flag)
            model.blocks[2].norm.bias.requires_grad_(not flag)

        return change

    flags = (True, True, False, False, True, True)
    check(Chain, *[Round(train, BATCH, before=freeze(flag)) for flag in flags])


def test_autocast_stays_whole(check: Callable[..., set[str]]) -> None:
    def function(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["x"])
        loss = F.mse_loss(output.float(), batch["target"])
        backward(loss)
        return loss

    assert check(Chain, function=function) == set()


def test_autocast_from_the_second_step_on(check: Callable[..., set[str]]) -> None:
    def function(model: Any, batch: Batch, backward: Callable[..., None]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["x"])
        loss = F.mse_loss(output.float(), batch["target"])
        backward(loss)
        return loss

    check(Chain, *[Round(f, BATCH) for f in (train, train, function, train, function)])


class Checkpointed(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("block", [Checkpointed, Reentrant])
def test_checkpointed_stays_whole(block: type[nn.Module], check: Callable[..., set[str]]) -> None:
    assert check(lambda: Around(block)) == set()


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.linear)(x)


def test_function_transforms(check: Callable[..., set[str]]) -> None:
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


class Branching(nn.Module):
    """Goes another way for some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.mean() > 0 else self.other(self.one(x))


def test_branches_on_data(check: Callable[..., set[str]]) -> None:
    turned = [{**BATCH, "x": BATCH["x"].roll(step, 0) - 0.02 * step} for step in range(4)]
    check(lambda: Around(Branching), *[Round(train, batch) for batch in turned])


def test_replicas_and_buckets() -> None:
    from tests.harness import run_distributed

    found = run_distributed(
        "tests.transparency.ranks:compare_replicas",
        4,
        kwargs={"name": "gpt", "num_steps": 3},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True, "pipeline": "zero_bubble"},
    )
    assert [wrong for _, wrong, _ in found] == [[]] * 4
    assert all(started for _, _, started in found)


class FlatGradients(Chain):
    """Gradients are views of one tensor, and so count their changes together."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        parameters = list(self.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, torch.zeros(sum(sizes)).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)


def test_gradients_that_are_views_of_one_tensor(check: Callable[..., set[str]]) -> None:
    assert check(FlatGradients) == all_but_norms(Chain)


def test_gradients_that_become_views_of_one_tensor(check: Callable[..., set[str]]) -> None:
    """As with ``gradient_as_bucket_view`` where gradients add up over steps."""

    def flat(module: nn.Module) -> None:
        module.__class__ = FlatGradients

    rounds = [Round(train, BATCH)] * 2
    assert check(Chain, *rounds, Round(train, BATCH, before=flat), *rounds) == all_but_norms(Chain)


def test_hooks_on_the_node_that_accumulates(check: Callable[..., set[str]]) -> None:
    """What optimizers of other libraries did before there were hooks on parameters."""
    kept: list[Any] = []

    def build() -> nn.Module:
        model = Chain()
        parameter = model.blocks[1].expand.weight
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def halve(*_: Any) -> None:
            parameter.grad.mul_(0.5)

        node.register_hook(halve)
        kept.append(node)
        return model

    assert "blocks.1.expand.weight" not in check(build)


class Looking(nn.Module):
    """A hook on the backward of a module looks at the gradients of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_full_backward_hook(self._double)

    @staticmethod
    def _double(module: nn.Module, *gradients: Any) -> None:
        if module.weight.grad is not None:
            module.weight.grad.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_hooks_on_backwards_of_modules(check: Callable[..., set[str]]) -> None:
    check(lambda: Around(Looking))


def test_numbers_that_are_none_at_first(open_session: OpenSession) -> None:
    """As with a loss scale that is too large."""
    open_session(2, "zigzag", pipeline="zero_bubble")
    module = Chain()
    model = smp.DistributedModel(module)
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index % 2)

    @smp.step
    def step(model: Any, batch: Batch) -> Any:
        return train(model, batch, model.backward)

    step(model, {**BATCH, "x": BATCH["x"] * float("inf")})
    assert split_names(model) == all_but_norms(Chain)


class Counted(Chain):
    """Hooks on all gradients of a block count together, and what they do depends on it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            hook = self._counting()
            for parameter in block.parameters():
                parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def _counting() -> Callable[[Tensor], None]:
        state = [0]

        def hook(parameter: Tensor) -> None:
            state[0] += 1
            parameter.grad.mul_(1 + state[0] % 5)

        return hook


class Reading(Chain):
    """A hook reads the gradient of another layer, which comes before it in a backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        for block in self.blocks:
            if where == "parameter":
                block.norm.weight.register_post_accumulate_grad_hook(self._after(block.expand.weight))
            elif where == "module":
                block.norm.register_full_backward_hook(self._module(block.expand.weight))
            else:
                block.norm.register_forward_hook(self._output(block.expand.weight))

    @staticmethod
    def _factor(other: Tensor) -> Any:
        return 1 if other.grad is None else 1 + other.grad.abs().sum()

    def _after(self, other: Tensor) -> Callable[..., None]:
        def hook(parameter: Tensor) -> None:
            parameter.grad.mul_(self._factor(other))

        return hook

    def _module(self, other: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            return None if inputs[0] is None else (inputs[0] * self._factor(other),)

        return hook

    def _output(self, other: Tensor) -> Callable[..., None]:
        def put(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * self._factor(other))

        return put


@pytest.mark.parametrize(
    "build", [Counted, *[partial(Reading, w) for w in ("parameter", "module", "output")]]
)
def test_hooks_that_know_of_each_other(
    build: Callable[[], nn.Module], check: Callable[..., set[str]]
) -> None:
    found = check(build)
    assert "blocks.1.expand.weight" not in found
    assert "head.weight" in found


class HoldsMore(nn.Module):
    """A weight of its own, and a layer inside whose hook looks at gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_full_backward_hook(Looking._double)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.gelu(F.linear(x, self.weight)))


def test_hooks_on_a_module_within_one_that_is_split(check: Callable[..., set[str]]) -> None:
    found = check(lambda: Around(HoldsMore))
    assert {name.split(".", 2)[2] for name in found} == {"weight"}


def steps_in_which_it_changes(
    open_session: OpenSession, module: Any, change: Callable[[nn.Module], None]
) -> Callable[[], Any]:
    """Two steps as they were; gives the one after the change."""
    open_session(2, "zigzag", pipeline="zero_bubble")
    model = smp.DistributedModel(module)
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index % 2)

    @smp.step
    def step(model: Any, batch: Batch) -> Any:
        return train(model, batch, model.backward)

    step(model, BATCH)
    step(model, BATCH)
    for block in module.blocks:
        change(block)
    return lambda: step(model, BATCH)


def test_a_hook_that_reads_later_is_an_error(open_session: OpenSession) -> None:
    def change(block: nn.Module) -> None:
        block.norm.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * block.expand.weight.grad.abs().sum(),)
        )

    step = steps_in_which_it_changes(open_session, Chain(), change)
    with pytest.raises(SMPError, match=r"expand\.weight' is read or set within a backward .*'interleaved'"):
        step()


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
    step = steps_in_which_it_changes(
        open_session, Around(Scaled), lambda block: setattr(block, "is_on", True)
    )
    with pytest.raises(SMPError, match=r"linear\.weight.*changed in place"):
        step()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_patched_class(
    is_late: bool, check: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_weights_that_are_set_in_a_forward(check: Callable[..., set[str]]) -> None:
    def grow(model: nn.Module) -> None:
        for block in model.blocks:
            block.linear.weight.data.mul_(1.5)

    assert check(lambda: Around(SetsData), *[Round(train, BATCH, before=grow)] * 3)


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
def test_complex_numbers(inside: Callable[[], nn.Module], check: Callable[..., set[str]]) -> None:
    rounds = [Round(train, BATCH), *[Round(train, BATCH, before=open_gates)] * 2]
    assert check(lambda: Around(lambda: Gated(inside)), *rounds) == set()


class Penalised(nn.Module):
    """A second use of a weight, whose gradient is zero for now."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.strength * self.linear.weight.square().sum()


def test_a_second_use_that_counts_later(check: Callable[..., set[str]]) -> None:
    def count(model: nn.Module) -> None:
        for block in model.blocks:
            block.strength = 0.1

    found = check(lambda: Around(Penalised), Round(train, BATCH), *[Round(train, BATCH, before=count)] * 2)
    assert {name.split(".", 2)[2] for name in found} <= {"linear.bias"}


class Dropping(Chain):
    """Other blocks of a stage in other microbatches, and now and then as many."""

    def __init__(self) -> None:
        super().__init__(6)

    def forward(self, x: Tensor) -> Tensor:
        for index in ((0, 2, 4), (0, 2), (2, 4))[int(3 * torch.rand(()))]:
            x = x + self.blocks[index](x)
        return self.head(self.blocks[1](x))


def test_other_layers_in_other_microbatches(check: Callable[..., set[str]]) -> None:
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
def test_zeros_show_nothing_of_a_rule(
    is_wrong: bool, check: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rule makes zeros of zeros as well; the right one is learned once there is something to see."""
    if is_wrong:
        _wrong_rule(monkeypatch)
    closed = Round(train, BATCH)
    rounds = [closed, closed, Round(train, BATCH, before=_opened), closed, closed, closed]
    split = check(lambda: nn.Sequential(Shut(), Shut()), *rounds)
    layers = {f"{number}.layer.{name}" for number in (0, 1) for name in ("weight", "bias")}
    assert split == (set() if is_wrong else layers)


def test_of_zeros_alone_nothing_is_split(check: Callable[..., set[str]]) -> None:
    assert check(lambda: nn.Sequential(Shut(), Shut())) == set()
