"""Legal torch that nobody would write for a recorder still gives plain torch's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models import Batch
from tests.models.layers import WIDTH, Chain, MLPBlock, regression_batch
from tests.sampling import marked
from tests.transparency.comparison import NUM_MICROBATCHES, compare, too_large
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal
from tests.transparency.users_code.hostile import CASES

BATCH = regression_batch(8)
Backward = Callable[..., None]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("num_stages", "placement", "pipeline"),
    [(2, "zigzag", "interleaved"), (3, "auto", "simple"), (3, "zigzag", "interleaved")],
)
@pytest.mark.parametrize("name", CASES)
def test_hostile_model(
    name: str, num_stages: int, placement: str, pipeline: str, open_session: OpenSession
) -> None:
    open_session(num_stages, placement, pipeline=pipeline)
    assert too_large(CASES[name], compare(CASES[name], placement)) == []


def train(model: Any, batch: Batch, backward: Backward) -> Any:
    output = model(batch["x"])
    loss = F.mse_loss(output, batch["target"])
    backward(loss)
    return {"loss": loss, "output": output}


def evaluate(model: Any, batch: Batch, backward: Backward) -> Any:
    return model(batch["x"]).sum(-1)


@pytest.fixture(params=[(2, "auto"), (3, "zigzag")], ids=lambda value: f"{value[0]}-{value[1]}")
def check(request: pytest.FixtureRequest, open_session: OpenSession) -> Callable[..., None]:
    """``check(build, rounds)`` compares rounds with plain torch in a fresh session."""
    num_stages, placement = request.param

    def run(build: Callable[[], nn.Module], *rounds: Round, tolerance: float = 0.0) -> None:
        open_session(num_stages, placement)
        assert_rounds_equal(build, rounds, placement, tolerance=tolerance)

    return run


def test_requires_grad_changes_between_steps(check: Callable[..., None]) -> None:
    def freeze(flag: bool) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            model.blocks[1].requires_grad_(flag)
            model.blocks[3].expand.weight.requires_grad_(flag)

        return change

    check(
        Chain,
        *[Round(train, BATCH, before=freeze(flag)) for flag in (True, False, False, True)],
    )


def test_train_and_eval_alternate(check: Callable[..., None]) -> None:
    def build() -> nn.Module:
        model = Chain()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = nn.Sequential(block, nn.BatchNorm1d(WIDTH))
        return model

    check(
        build,
        Round(train, BATCH),
        Round(evaluate, BATCH, before=nn.Module.eval, no_grad=True),
        Round(train, BATCH),
        Round(train, BATCH, before=nn.Module.train),
        Round(evaluate, BATCH, no_grad=True),
    )


class Truncating(nn.Module):
    """Returns as many features as an attribute says; a block scales by one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Truncated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.pad(block(x), (0, WIDTH - block.width))
        return x


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.width = WIDTH
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)[:, : self.width]


def test_attributes_change_between_steps(check: Callable[..., None]) -> None:
    def change(model: nn.Module) -> None:
        model.blocks[1].width -= 5
        model.blocks[2].scale *= 1.5

    check(Truncating, Round(train, BATCH), *[Round(train, BATCH, before=change)] * 2)


def test_batch_size_changes_between_steps(check: Callable[..., None]) -> None:
    check(Chain, *[Round(train, regression_batch(num)) for num in (8, 4, 16, 8)])


def test_grad_tensors(check: Callable[..., None]) -> None:
    def step(model: Any, batch: Batch, backward: Backward) -> Tensor:
        loss = model(batch["x"]).square()
        backward(loss, batch["target"])
        return loss

    check(Chain, *[Round(step, BATCH)] * 2)


def test_several_losses_in_a_microbatch(check: Callable[..., None]) -> None:
    """One backward does what torch does in two, so the sums come in another order."""

    def two_calls(model: Any, batch: Batch, backward: Backward) -> Tensor:
        output = model(batch["x"])
        first = F.mse_loss(output, batch["target"])
        backward(first)
        second = output[:, 0].square().mean()
        backward(second)
        return first + second.detach()

    def one_call(model: Any, batch: Batch, backward: Backward) -> Tensor:
        output = model(batch["x"])
        losses = [output.mean(), output.square().mean()]
        backward(losses)
        return torch.stack(losses)

    check(Chain, Round(two_calls, BATCH), Round(one_call, BATCH), tolerance=1e-6)


def test_two_calls_of_the_model_and_a_detach_between(check: Callable[..., None]) -> None:
    class Adversaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = Chain(2)
            self.critic = Chain(2)

        def forward(self, x: Tensor, which: str) -> Tensor:
            return getattr(self, which)(x)

    def step(model: Any, batch: Batch, backward: Backward) -> tuple[Tensor, Tensor]:
        fake = model(batch["x"], "generator")
        critic_loss = model(fake.detach(), "critic").mean() - model(batch["target"], "critic").mean()
        backward(critic_loss)
        return critic_loss, fake

    def generate(model: Any, batch: Batch, backward: Backward) -> Tensor:
        loss = -model(model(batch["x"], "generator"), "critic").mean()
        backward(loss)
        return loss

    check(Adversaries, Round(step, BATCH), Round(generate, BATCH), Round(step, BATCH))


def test_value_of_an_earlier_microbatch(check: Callable[..., None]) -> None:
    def build_step() -> Callable[..., Tensor]:
        kept: list[Tensor] = []

        def step(model: Any, batch: Batch, backward: Backward) -> Tensor:
            output = model(batch["x"])
            if len(kept) % NUM_MICROBATCHES:
                output = output + kept[-1]
            kept.append(output.detach())
            loss = F.mse_loss(output, batch["target"])
            backward(loss)
            return loss

        return step

    check(Chain, Round(build_step(), BATCH), Round(build_step(), BATCH))


def test_tensor_that_collects_over_microbatches(check: Callable[..., None]) -> None:
    totals: dict[int, Tensor] = {}

    def step(model: Any, batch: Batch, backward: Backward) -> Tensor:
        total = totals.setdefault(id(model), torch.zeros(2))
        output = model(batch["x"])
        loss = F.mse_loss(output, batch["target"])
        backward(loss)
        total[0] += loss.detach()
        total[1] += 1
        return loss

    check(Chain, Round(step, BATCH), Round(step, BATCH))
    plain, ours = totals.values()
    assert ours[1] == 2 * NUM_MICROBATCHES
    assert torch.equal(ours, plain)


def test_tensors_that_die_and_leave_their_address(check: Callable[..., None]) -> None:
    """A tensor that took an activation in place is known by its id, which is used again."""

    def step(model: Any, batch: Batch, backward: Backward) -> Tensor:
        output = model(batch["x"])
        for index in range(20):
            scratch = torch.zeros(index % 3 + 1)
            scratch += output.detach().mean()
            del scratch
            fresh = torch.ones(index % 3 + 1)
            assert fresh.sum().item() == index % 3 + 1
        loss = F.mse_loss(output, batch["target"])
        backward(loss)
        return loss

    check(Chain, Round(step, BATCH))


def test_parameters_among_the_results(check: Callable[..., None]) -> None:
    def step(model: Any, batch: Batch, backward: Backward) -> dict[str, Any]:
        output = model(batch["x"])
        module = getattr(model, "module", model)
        loss = F.mse_loss(output, batch["target"]) + 0.01 * module.head.weight.square().sum()
        backward(loss)
        return {
            "bias": module.blocks[2].contract.bias,
            "norm": module.head.weight.norm(),
            "loss": loss,
        }

    check(Chain, Round(step, BATCH), Round(step, BATCH))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "iteration": lambda y: sum(row.sum() for row in y),
    "len": lambda y: len(y) * y.shape[1],
    "tolist": lambda y: y.mean(0).tolist(),
    "float": lambda y: float(y.mean()),
    "format": lambda y: f"{y.mean():.4f} {y.sum().item():.2f}",
    "repr": lambda y: repr(y.detach()),
    "numpy": lambda y: float(np.asarray(y.detach()).sum()) + y.detach().numpy().max().item(),
    "min": lambda y: min(y.sum(), y.mean(), y.max()),
    "sorted": lambda y: sorted([y[0, 0], y[0, 1], y[1, 0]]),
    "boolean": lambda y: (bool(y.sum() > 0), not (y.mean() > 0), torch.equal(y, y.clone())),
    "nonzero": lambda y: (y > 0).nonzero(),
    "unique": lambda y: torch.unique((y * 3).round().int()),
    "index": lambda y: [10, 20, 30][int(y.argmax()) % 3],
    "index_tensor": lambda y: torch.arange(100)[(y > 0).sum()],
    "tensor_of_losses": lambda y: torch.tensor([y.sum(), y.mean()]),
    "tensor_of_tensor": lambda y: torch.tensor(y.detach().tolist()),
    "full": lambda y: torch.full((2,), y.sum().detach()),
    "masked_rows": lambda y: y[y[:, 0] > 0].shape,
    "one_hot": lambda y: F.one_hot(y.argmax(1)),
    "out": lambda y: torch.add(y.detach(), 1, out=torch.empty(2, WIDTH)),
    "structseq": lambda y: (y.max(1), y.topk(3).indices, torch.linalg.svd(y.detach()).S),
    "random": lambda y: torch.rand(3) + y.detach().sum(),
    "distribution": lambda y: torch.distributions.Normal(y, 1.0).log_prob(torch.zeros(WIDTH)),
    "bits": lambda y: y.detach().view(torch.int32),
}


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("name", marked("host", READERS, "numpy"))
def test_reading_an_activation(name: str, open_session: OpenSession) -> None:
    def step(model: Any, batch: Batch, backward: Backward) -> tuple[Any, Tensor]:
        output = model(batch["x"])
        found = READERS[name](output)
        loss = F.mse_loss(output, batch["target"])
        backward(loss)
        return found, loss

    open_session(2, "zigzag")
    assert_rounds_equal(Chain, [Round(step, BATCH)] * 2)


class Forces(nn.Module):
    """Its result is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return force


def test_gradients_inside_a_module_that_is_traced(open_session: OpenSession) -> None:
    def step(model: Any, batch: Batch, backward: Backward) -> Tensor:
        loss = F.mse_loss(model(batch["x"]), batch["target"])
        backward(loss)
        return loss

    open_session(2)
    assert_rounds_equal(lambda: nn.Sequential(Forces(), nn.Linear(WIDTH, WIDTH)), [Round(step, BATCH)] * 2)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "second_order": (
        lambda model, y: torch.autograd.grad(y.sum(), y, create_graph=True),
        "gradients of gradients are not supported",
    ),
    "loss_backward": (lambda model, y: y.sum().backward(), r"call model.backward\(loss\)"),
    "detach_in_place": (lambda model, y: (y * 1).detach_(), r"write x = x.detach\(\)"),
    "python_function": (lambda model, y: y.detach().apply_(float), "use torch functions"),
    "data": (lambda model, y: setattr(torch.zeros(2, WIDTH), "data", y), "cannot be recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name: str, open_session: OpenSession) -> None:
    act, message = REFUSED[name]
    open_session(2)
    model = smp.DistributedModel(Chain())

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        act(model, output)
        return output.sum()

    with pytest.raises(smp.SMPError, match=message):
        step(model, BATCH["x"])


def test_a_step_works_after_one_that_failed(open_session: OpenSession) -> None:
    open_session(2)
    torch.manual_seed(0)
    module = Chain()
    with contextlib.suppress(smp.SMPError):
        assert_rounds_equal(
            lambda: module,
            [Round(lambda model, batch, backward: model(batch["x"]).sum().backward(), BATCH)],
            "auto",
        )
    model = smp.state.model

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), target)
        model.backward(loss)
        return loss

    module.zero_grad()
    found = step(model, **BATCH).reduce_mean()
    gradient = module.head.weight.grad.clone()
    module.zero_grad()
    wanted = F.mse_loss(module(BATCH["x"]), BATCH["target"])
    wanted.backward()
    assert torch.allclose(found, wanted)
    assert torch.allclose(gradient, module.head.weight.grad, atol=1e-6)
