"""Steps that run while they are recorded, in memory and in the ranks of an MPI job."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.runtime.stage.executor import StageExecutor
from smp_lite.runtime.step import running_list
from smp_lite.runtime.step.running_list import RunningList
from smp_lite.runtime.step.step_runner import StepRunner
from tests.models.layers import WIDTH, Chain, regression_batch
from tests.transparency.schedules.differing import MICROBATCHES, assert_equal_to_plain

BY_HAND = {"auto_partition": False, "default_partition": 0}
ALIKE = [0] * MICROBATCHES
CHECKED = 3
"""So many first steps are recorded to their ends before they run."""

Function = Callable[[Any, int, Tensor, Tensor], Any]
"""(model, number of the microbatch over all steps, x, target) -> output; calls no backward."""


@contextlib.contextmanager
def noted_ends() -> Iterator[list[int | None]]:
    """Of each list that runs ahead: where it was cut, or None."""
    ends: list[int | None] = []
    end = RunningList.end

    def noted(running: RunningList, cut: int | None = None) -> None:
        ends.append(cut)
        end(running, cut)

    with mock.patch.object(RunningList, "end", noted):
        yield ends


def differ(name: str, first: int) -> list[int | None]:
    """Steps that are alike, and two that differ from one microbatch on; returns where lists were cut."""
    other = [0] * first + [2] * (MICROBATCHES - first)
    with noted_ends() as ends:
        assert_equal_to_plain(name, [ALIKE] * (CHECKED + 2) + [other] + [ALIKE] * 2 + [other, ALIKE])
    return ends


def differ_on_rank(name: str, first: int) -> list[int | None]:
    smp.init()
    return differ(name, first)


class Order(nn.Module):
    """A chain over two stages."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(1):
            self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def order_of_events() -> list[str]:
    """What this process does in a step that runs ahead: records (R0), runs (F0 on stage 1: 1F0)."""
    model = smp.DistributedModel(Order())
    events: list[str] = []
    forward = StageExecutor._forward

    def noted(executor: StageExecutor, action: Any, state: Any) -> None:
        events.append(f"{executor.stage_index}F{action.microbatch_index}")
        forward(executor, action, state)

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> None:
        events.append(f"R{len([each for each in events if each.startswith('R')])}")
        model.backward(F.mse_loss(model(x), target))

    batch = regression_batch(8)
    never = mock.patch.object(running_list, "_LONGEST_SPELL_S", math.inf)  # whatever else the machine does
    with mock.patch.object(StageExecutor, "_forward", noted), never:
        for _ in range(CHECKED + 1):
            events.clear()
            step(model, batch["x"], batch["target"])
    return events


def order_on_rank() -> list[str]:
    smp.init()
    return order_of_events()


def train(function: Function, num_steps: int, caught: type[Exception] = smp.SMPError) -> list[Any]:
    """Trains a chain with the function, in the open session and in plain torch, which leaves out what fails.

    Returns:
        Texts of the errors of the steps that failed, and whether parameters and results are plain torch's.
    """
    torch.manual_seed(0)
    model = smp.DistributedModel(Chain())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    count = 0

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        number, count = count, count + 1
        loss = F.mse_loss(function(model, number, x, target), target)
        model.backward(loss)
        return loss

    texts: list[str] = []
    losses: list[Tensor] = []
    failed: list[int] = []
    for number in range(num_steps):
        optimizer.zero_grad()
        batch = _batch(number)
        count = number * MICROBATCHES
        try:
            losses += step(model, batch["x"], batch["target"]).outputs
        except caught as error:
            texts.append(f"{type(error).__name__}: {error}")
            failed.append(number)
            assert all(parameter.grad is None for parameter in model.local_parameters())
            continue
        optimizer.step()
    plain, expected = _plain(function, num_steps, failed)
    state = model.state_dict()
    is_equal = all(torch.equal(state[key], value.cpu()) for key, value in plain.items())
    return [texts, is_equal and all(map(torch.equal, losses, expected))]


def _batch(number: int) -> dict[str, Tensor]:
    return {name: tensor.roll(number, 0) for name, tensor in regression_batch(2 * MICROBATCHES).items()}


def _plain(function: Function, num_steps: int, failed: list[int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(num_steps):
        if number in failed:
            continue
        optimizer.zero_grad()
        batch = _batch(number)
        pairs = zip(batch["x"].chunk(MICROBATCHES), batch["target"].chunk(MICROBATCHES), strict=True)
        for m, (x, target) in enumerate(pairs):
            loss = F.mse_loss(function(model, number * MICROBATCHES + m, x, target), target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
    return model.state_dict(), losses


def _is_late(number: int, first: int, step: int) -> bool:
    """Whether it is a microbatch of that step, from the first one on that does something else."""
    return number // MICROBATCHES == step and number % MICROBATCHES >= first


class OneMask:
    """One tensor for the masks of all microbatches, written anew for each."""

    def __init__(self, since: int, how: str = "copy_") -> None:
        self.since, self.how = since, how
        self.mask = torch.ones(WIDTH)

    def __call__(self, model: Any, number: int, x: Tensor, target: Tensor) -> Tensor:
        if number // MICROBATCHES < self.since:
            return model(x) * torch.ones(WIDTH)
        value = torch.full((WIDTH,), 1.0 + (number % 5) / 8)
        if self.how == "data":
            self.mask.data = value
        else:
            getattr(self.mask, self.how)(value)
        return model(x) * self.mask


class EarlierValue:
    """A value of one microbatch is used in the next, in one step only."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.last: Any = None

    def __call__(self, model: Any, number: int, x: Tensor, target: Tensor) -> Tensor:
        output = model(x)
        last, self.last = self.last, output.detach()
        return output + last if _is_late(number, 2, self.step) else output


class OnOneRank:
    """Does something else on one rank, in one step."""

    def __init__(self, what: str, rank: int, first: int, step: int) -> None:
        self.what, self.rank, self.first, self.step = what, rank, first, step

    def __call__(self, model: Any, number: int, x: Tensor, target: Tensor) -> Tensor:
        output = model(x)
        mine = smp.state.world is None or smp.mp_rank() == self.rank or self.rank < 0
        if mine and _is_late(number, self.first, self.step):
            if self.what == "raises":
                raise ValueError("the user's own")
            if self.what == "looks":
                return output * (1.0 if float(output.detach().sum()) else 2.0)
            return output * 2.0
        return output


def train_on_rank(what: str, rank: int, first: int, wire: str = "mpi") -> list[Any]:
    """A function that does something else on one rank in the last step but two."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    with noted_ends() as ends:
        function = OnOneRank(what, rank, first, CHECKED + 1)
        found = train(function, CHECKED + 4, (smp.SMPError, ValueError))  # type: ignore[arg-type]
    return [*found, ends]


def train_where_one_rank_knows_less() -> list[Any]:
    """One rank has forgotten which steps it knows."""
    smp.init()
    forgotten = []

    def function(model: Any, number: int, x: Tensor, target: Tensor) -> Tensor:
        if number == (CHECKED + 1) * MICROBATCHES and smp.mp_rank() == 1 and not forgotten:
            planner = smp.state.model.runtime.runner.planner
            forgotten.append(len(planner._of_alike))
            planner._of_alike.clear()
        return model(x)

    with noted_ends() as ends:
        found = train(function, CHECKED + 4)
    return [*found, ends, forgotten]


class Dropping(nn.Module):
    """Draws random numbers inside of calls that run as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class Reusing(Order):
    """Two layers by turns, so that each has its gradient from two visits of a stage."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.tanh(super().forward(x))))


def with_and_without(kind: str, num_steps: int = CHECKED + 4) -> tuple[list[list[Tensor]], list[int | None]]:
    """Trains twice, the second time without running ahead; what each has made, and the ends of lists."""
    found = []
    with noted_ends() as ends:
        for is_off in (False, True):
            with contextlib.ExitStack() as stack:
                if is_off:
                    stack.enter_context(mock.patch.object(StepRunner, "_start_ahead"))
                found.append(_trained(kind, num_steps))
    return found, ends


def _trained(kind: str, num_steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    smp.reset()
    smp.init(PARAMETERS[kind]) if RANKS[kind] else smp.init_in_memory(PARAMETERS[kind])
    model = smp.DistributedModel(Dropping() if kind == "draws" else Reusing(), bucket_cap_mb=0.001)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    count = 0

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        number, count = count, count + 1
        output = model(x)
        if kind == "draws":
            output = output * torch.rand(())
        elif _is_late(number, 2, CHECKED + 1) and (kind == "reuses" or smp.dp_rank() == 0):
            output = model(output)
        loss = F.mse_loss(output, target)
        model.backward(loss)
        return loss

    results: list[Tensor] = []
    for number in range(num_steps):
        optimizer.zero_grad()
        batch = _batch(number)
        results += step(model, batch["x"], batch["target"]).outputs
        optimizer.step()
    return [*results, *[p.detach().clone() for p in model.local_parameters()], torch.rand(3)]


PARAMETERS: dict[str, dict[str, Any]] = {
    "draws": {"partitions": 2, "microbatches": MICROBATCHES},
    "reuses": {"partitions": 2, "microbatches": MICROBATCHES, **BY_HAND},
    "replicas": {"partitions": 2, "microbatches": MICROBATCHES, **BY_HAND, "ddp": True},
}
RANKS = {"draws": False, "reuses": False, "replicas": True}


def replicas_on_rank() -> tuple[bool, list[int | None]]:
    """One replica does something else in one step, whose gradients are reduced with the other's."""
    (ours, theirs), ends = with_and_without("replicas")
    return all(map(torch.equal, ours, theirs)), ends


class Slow(Order):
    """The first stage takes its time, so that the second waits."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = SlowLayer()


class SlowLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


def give_up_while_waiting() -> list[str]:
    """The step function fails on all ranks while the second one waits for the first; what is raised."""
    smp.init()
    model = smp.DistributedModel(Slow())
    count = 0

    @smp.step
    def step(model: Any, x: Tensor, target: Tensor) -> None:
        nonlocal count
        model.backward(F.mse_loss(model(x), target))
        count += 1
        if count == (CHECKED + 2) * MICROBATCHES:
            raise ValueError("the user's own")

    texts: list[str] = []
    batch = regression_batch(2 * MICROBATCHES)
    forward = StageExecutor._forward

    def noted(executor: StageExecutor, action: Any, state: Any) -> None:
        if count == (CHECKED + 2) * MICROBATCHES:
            texts.append("computed what nobody needs")
        forward(executor, action, state)

    with mock.patch.object(StageExecutor, "_forward", noted):
        for number in range(CHECKED + 4):
            count = number * MICROBATCHES
            try:
                step(model, batch["x"], batch["target"])
            except ValueError as error:
                texts.append(str(error))
    return texts
