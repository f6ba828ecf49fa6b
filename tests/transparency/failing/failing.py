"""Training loops that catch the error of a step and go on; run in memory and in the ranks of an MPI job."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models.layers import WIDTH, Chain, MLPBlock, regression_batch

NUM_STEPS = 5
FAILING_STEPS = (1, 3)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _fail_if("backward")
        return gradient


def _fail_if(where: str) -> None:
    waiting = os.environ.get("FAIL_NEXT", "")
    if waiting.startswith(where):
        os.environ["FAIL_NEXT"] = waiting.removeprefix(where)
    if waiting == where:
        raise torch.OutOfMemoryError("out of memory, as if")


class Failing(nn.Module):
    """Normalises over the batch, so that a failed step could leave something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(x))
        if not isinstance(x, torch._subclasses.FakeTensor):
            _fail_if("forward")
        return x + FailsInBackward.apply(y)


class FailingChain(Chain):
    """Its own forward, which every rank runs, changes buffers in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Failing() for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.factor = self.factor * 0.9
        first = self.blocks[0](x / self.calls)
        self.mean.mul_(0.5).add_(first.detach().mean(0), alpha=0.5)
        return super().forward(first * self.factor - self.mean)


class FailingBlock(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + FailsInBackward.apply(super().forward(x))


class FailingReuse(nn.Module):
    """The first block comes last once more, so parts of its gradient are summed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FailingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 3, 0):
            x = self.blocks[index](x)
        return x


def batches() -> list[dict[str, Tensor]]:
    return [_rolled(step) for step in range(NUM_STEPS)]


def _rolled(number: int) -> dict[str, Tensor]:
    return {name: tensor.roll(number, 0) for name, tensor in regression_batch(8).items()}


def plain_states(
    skipped: tuple[int, ...],
    build: Callable[[], nn.Module] = FailingChain,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Where plain torch ends that never sees the failing steps' batches.

    Args:
        device: where it trains, torch's default one without it.

    Returns:
        On the host, where that of DistributedModel is too.
    """
    device = device or torch.get_default_device()
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches()):
        if step in skipped:
            continue
        optimizer.zero_grad()
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        for x, target in zip(batch["x"].chunk(4), batch["target"].chunk(4)):
            (F.mse_loss(model(x), target) / 4).backward()
        optimizer.step()
    return {key: value.cpu() for key, value in model.state_dict().items()}


def train(
    where: str, failing_rank: int, build: Callable[[], nn.Module] = FailingChain, fail_at: int = 1
) -> tuple[dict[str, Tensor], list[str]]:
    """Trains in the open session; returns the whole state and the texts of the errors that were caught.

    Args:
        where: "forward", "backward", "recording" (on the failing rank), "everywhere" (in recording, on all),
            "exchanging" (what is refused when all has been recorded).
        failing_rank: of the mp group; in memory any.
        build: makes the model.
        fail_at: which of the calls there that could fail does.
    """
    torch.manual_seed(0)
    module = build()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    fails_here = smp.state.world is None or smp.mp_rank() == failing_rank
    calls = itertools.count()

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor, fail: bool) -> Tensor:
        output = model(x)
        if fail and (where == "everywhere" or (where == "recording" and fails_here)):
            raise ValueError("the user's own")
        loss = F.mse_loss(output, target)
        model.backward(loss)
        if fail and where == "exchanging" and fails_here and next(calls) % 4 == 3:
            module.head.bias = nn.Parameter(torch.zeros(WIDTH))
        return loss

    texts = []
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        fail = number in FAILING_STEPS
        if fail and fails_here and where in ("forward", "backward"):
            os.environ["FAIL_NEXT"] = where * fail_at
        try:
            step(model, batch["x"], batch["target"], fail)
        except (torch.OutOfMemoryError, ValueError, smp.SMPError) as error:
            texts.append(f"{type(error).__mro__[1].__name__}: {error}")
            assert all(parameter.grad is None for parameter in model.local_parameters())
            continue
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}, texts


def train_on_rank(where: str, failing_rank: int, wire: str = "mpi") -> tuple[bool, list[str]]:
    """Whether the state is that of plain torch without the failing steps; the errors' texts."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    state, texts = train(where, failing_rank)
    # What is on the pretended device is to the bit what it is on the host.
    device = smp.state.device if smp.state.device.type == "cuda" else torch.device("cpu")
    plain = plain_states(FAILING_STEPS, device=device)
    return all(torch.equal(value, plain[key]) for key, value in state.items()), texts


def train_on_one_replica(where: str, fail_at: int = 1, replica: int = 0) -> tuple[bool, list[str]]:
    """As :func:`train_on_rank`, with two replicas of which one fails."""
    smp.init()
    state, texts = train(where, 0 if smp.dp_rank() == replica else -1, fail_at=fail_at)
    for parameter in smp.state.model.local_parameters():
        assert not parameter._post_accumulate_grad_hooks  # none of ours has stayed
    plain = plain_states(FAILING_STEPS)
    return all(torch.equal(value, plain[key]) for key, value in state.items()), texts


FAILING_DRAWS = {0: 0, 5: 2}
"""In which microbatch of which steps rank 1's function fails: before the model is cut, and after."""


def _draws() -> Tensor:
    return torch.rand(()) + random.random() + float(numpy.random.rand())


def _seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def draw_on_after_a_failure() -> list[float]:
    """The losses of steps whose function draws, where that of rank 1 alone fails now and then."""
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(Chain())
    counted = {"microbatch": 0}

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor, fail_at: int) -> Tensor:
        noise = _draws()
        if smp.rank() == 1 and fail_at == counted["microbatch"]:
            raise ValueError("the user's own")
        counted["microbatch"] += 1
        loss = F.mse_loss(model(x + noise), target)
        model.backward(loss)
        return loss

    _seed_all()
    losses = []
    for number in range(7):
        batch = regression_batch(8)
        counted["microbatch"] = 0
        try:
            loss = step(model, batch["x"], batch["target"], FAILING_DRAWS.get(number, -1))
            losses.append(loss.reduce_mean().item())
        except (ValueError, smp.SMPError):
            assert number in FAILING_DRAWS
        losses.append(_draws().item())  # between steps
    return losses


def losses_of_draws() -> list[float]:
    """What plain torch makes of :func:`draw_on_after_a_failure`."""
    torch.manual_seed(0)
    model = Chain()
    _seed_all()
    losses = []
    for number in range(7):
        batch = regression_batch(8)
        total = torch.zeros(())
        for m, (x, target) in enumerate(zip(batch["x"].chunk(4), batch["target"].chunk(4))):
            noise = _draws()
            if FAILING_DRAWS.get(number) == m:
                break
            total += F.mse_loss(model(x + noise), target).detach()
        else:
            losses.append((total / 4).item())
        losses.append(_draws().item())
    return losses


FAILING_PASSES = (1, 4)
"""The second of two whose gradients are added up, and the first."""


def accumulate_after_failures() -> tuple[bool, list[str]]:
    """Two replicas add up the gradients of two passes; the second one fails in some; all begin anew then."""
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(Failing(), backward_passes_per_step=2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward(F.mse_loss(model(x), target))

    texts, added = [], 0
    for number in range(9):
        batch = _rolled(number)
        if smp.rank() == 1 and number in FAILING_PASSES:
            os.environ["FAIL_NEXT"] = "forward"
        try:
            step(model, batch["x"], batch["target"])
        except (torch.OutOfMemoryError, smp.SMPError) as error:
            texts.append(str(error))
            added = 0
            continue
        added += 1
        if added == 2:
            optimizer.step()
            optimizer.zero_grad()
            added = 0
    state, plain = model.state_dict(), _accumulated()
    return all(torch.equal(value.cpu(), plain[key].cpu()) for key, value in state.items()), texts


def _accumulated() -> dict[str, Tensor]:
    """Where plain torch ends that takes the passes in pairs which do not fail."""
    torch.manual_seed(0)
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in ((0,), (2, 3), (5, 6), (7, 8)):
        for number in numbers:
            batch = _rolled(number)
            for x, target in zip(batch["x"].chunk(4), batch["target"].chunk(4)):
                (F.mse_loss(model(x), target) / 4).backward()
        if len(numbers) == 2:
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def evaluate_and_fail_on_one_replica() -> tuple[bool, list[str]]:
    """A step without a backward fails on one of two replicas, in training mode; then both train."""
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(Failing())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def look(model: Any, x: Tensor, fail: bool) -> Tensor:
        output = model(x)
        if fail:
            raise ValueError("the user's own")
        return output

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward(F.mse_loss(model(x), target))

    texts: list[str] = []
    for number in range(4):
        batch = _rolled(number)
        try:
            look(model, batch["x"], smp.rank() == 1 and number in FAILING_STEPS)
        except ValueError as error:
            texts.append(str(error))
        optimizer.zero_grad()
        step(model, batch["x"], batch["target"])
        optimizer.step()
    return all(value.isfinite().all() for value in model.state_dict().values()), texts


class Counting(MLPBlock):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + super().forward(x / self.count)


class Tagging(nn.Module):
    """From some step on its second block is given a tensor with an attribute, so all ranks run its code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))
        self.tags = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.tags:
            x.tag = "mine"
        return self.blocks[1](x)


def fail_in_the_step_that_opens_a_block() -> list[float]:
    """What the blocks have counted, and the loss after that."""
    smp.init()
    torch.manual_seed(0)
    module = Tagging()
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor, fail: bool) -> Tensor:
        loss = F.mse_loss(model(x), target)
        model.backward(loss)
        if fail:
            raise ValueError("the user's own")
        return loss

    batch = _rolled(0)
    step(model, batch["x"], batch["target"], False)
    module.tags = True
    try:
        step(model, batch["x"], batch["target"], True)
    except ValueError:
        loss = step(model, batch["x"], batch["target"], False).reduce_mean()
    state = model.state_dict()
    return [state["blocks.0.count"].item(), state["blocks.1.count"].item(), loss.item()]


def counted_without_the_failure() -> list[float]:
    """What plain torch makes of the other two steps."""
    torch.manual_seed(0)
    module = Tagging()
    batch = _rolled(0)
    for _ in range(2):
        losses = [F.mse_loss(module(x), t) for x, t in zip(batch["x"].chunk(4), batch["target"].chunk(4))]
    loss = torch.stack(losses).mean()
    return [module.blocks[0].count.item(), module.blocks[1].count.item(), loss.item()]


class CountsTwice(nn.Module):
    """Buffers of blocks, changed by these and, before or after them, by the code around them."""

    def __init__(self, root_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))
        self.root_first = root_first

    def forward(self, x: Tensor) -> Tensor:
        if self.root_first:
            self.blocks[0].count += 10
        x = self.blocks[1](self.blocks[0](x))
        if not self.root_first:
            self.blocks[0].count += 10
        return x


def counts_after_a_failure(root_first: bool, fail_at: int) -> list[list[float]]:
    """The counts of both blocks after each of three steps, of which one fails."""
    smp.init()
    model = smp.DistributedModel(CountsTwice(root_first))

    @smp.step
    def step(model: Any, x: Tensor, fail: bool) -> Tensor:
        loss = model(x).square().mean()
        if fail:
            raise ValueError("the user's own")
        model.backward(loss)
        return loss

    found = []
    for number in range(3):
        try:
            step(model, _rolled(number)["x"], number == fail_at)
        except ValueError:
            assert number == fail_at
        state = model.state_dict()
        found.append([state[f"blocks.{i}.count"].item() for i in (0, 1)])
    return found


class Open(nn.Module):
    """Lies on two stages, so all ranks run its code, which changes a buffer with a placed value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        smp.set_partition(self.second, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(self.first(x)))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return x + y


def meet_blocks_after_a_failure() -> list[str]:
    """What three steps end with: rank 1 fails in the first one, before it has met the last block."""
    smp.init()
    module = nn.Sequential(Open(), Counting(), Counting())
    fails = [smp.rank() == 1]

    def hook(block: nn.Module, inputs: Any) -> None:
        if fails.pop() if fails else False:
            raise ValueError("the user's own")

    module[1].register_forward_pre_hook(hook)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    found = []
    for number in range(3):
        try:
            step(model, _rolled(number)["x"])
            found.append("")
        except (ValueError, smp.SMPError) as error:
            found.append(str(error))
    return found
