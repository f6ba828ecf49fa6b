"""Children of a Sequential that are computed again together: the same to the bit, and kept less."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.session import current
from tests.harness import run_distributed
from tests.sampling import one_in

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


class Block(nn.Module):
    """Its only sigmoid tells how often it runs."""

    def __init__(self, width: int = 6, dropout: float = 0.3) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(width, 4 * width), nn.Dropout(dropout)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.sigmoid(self.up(x))))


class Row(nn.Module):
    """Six blocks in a Sequential, with stateless modules between, and ends around."""

    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.row = nn.Sequential(*(part for _ in range(3) for part in (kind(), nn.Tanh(), kind())))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.row(self.stem(x)))


Mark = Callable[[Any], None]


def marked(strategy: str, **options: Any) -> Mark:
    return lambda net: smp.set_activation_checkpointing(net.row, strategy=strategy, **options)


def unmarked(net: Any) -> None:
    pass


def trained(mark: Mark, build: Callable[[], nn.Module] = Row, steps: int = 2) -> dict[str, Any]:
    labels: list[list[str]] = []
    current().on_planned = lambda batch, recordings: labels.append(
        [command.label for command in recordings[0].commands if command.module is not None]
    )
    torch.manual_seed(0)
    net = build()
    model = smp.DistributedModel(net)
    mark(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @smp.step
    def test_step(model: Any, x: Tensor) -> Tensor:
        return model(x).sum()

    losses, runs = [], 0
    for i in range(steps):
        with mock.patch.object(torch, "sigmoid", wraps=torch.sigmoid) as sigmoid:
            optimizer.zero_grad()
            losses.append(float(train_step(model, torch.linspace(-1, i, 24).reshape(4, 6)).reduce_mean()))
            runs = sigmoid.call_count
        optimizer.step()
    with torch.no_grad(), mock.patch.object(torch, "sigmoid", wraps=torch.sigmoid) as sigmoid:
        model.eval()
        for _ in range(2):
            sigmoid.reset_mock()
            losses.append(float(test_step(model, torch.ones(4, 6)).reduce_mean()))
        evaluation = sigmoid.call_count
    return {
        "losses": losses,
        "state": model.state_dict(),
        "runs": runs,
        "evaluation": evaluation,
        "labels": labels[steps - 1],
    }


def in_memory(mark: Mark, build: Callable[[], nn.Module] = Row, **parameters: Any) -> dict[str, Any]:
    smp.reset()
    smp.init_in_memory({"microbatches": 2, **parameters})
    return trained(mark, build)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["losses"] == b["losses"] and all(
        torch.equal(value, b["state"][name]) for name, value in a["state"].items()
    )


STRATEGIES = ("each", "group_2", "group_4", "contiguous")
PARAMETERS: list[dict[str, Any]] = [
    {"partitions": 1},
    {"partitions": 2},
    {"partitions": 3, "pipeline": "simple"},
    {"partitions": 2, "static_mode": True},
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parameters", one_in(2, PARAMETERS), ids=str)
def test_equal_to_the_bit_whatever_the_strategy(parameters: dict[str, Any]) -> None:
    """Dropout has the masks that it has without; six blocks, two microbatches."""
    expected = in_memory(unmarked, **parameters)
    assert expected["runs"] == expected["evaluation"] == 12
    for strategy in STRATEGIES:
        found = in_memory(marked(strategy), **parameters)
        assert same(found, expected), strategy
        assert found["runs"] == 24, strategy
        assert found["evaluation"] == 12, strategy


def test_groups_of_a_sequential_that_is_cut_are_one_call_each() -> None:
    found = in_memory(marked("group_4"), partitions=2)
    assert found["labels"] == [
        "stem",
        "row.0 to row.3 (checkpointed)",
        "row.4",
        "row.5 to row.8 (checkpointed)",
        "head",
    ]
    assert in_memory(marked("group_4"), partitions=1)["labels"] == ["model"]


def on_ranks(strategy: str | None) -> dict[str, Any]:
    smp.init()
    return trained(unmarked if strategy is None else marked(strategy))


@pytest.mark.thorough
def test_on_real_ranks() -> None:
    parameters = {"partitions": 2, "microbatches": 2}
    expected, *found = (
        run_distributed(f"{__name__}:on_ranks", 2, kwargs={"strategy": strategy}, parameters=parameters)
        for strategy in (None, "contiguous", "group_2")
    )
    for ranks in found:
        assert all(same(a, b) for a, b in zip(ranks, expected, strict=True))
        assert sum(rank["runs"] for rank in ranks) == 24


def kept_bytes(strategy: str | None, blocks: int = 6, width: int = 64) -> int:
    """What autograd keeps of a forward, in memory that is neither a parameter nor the input."""
    smp.reset()
    smp.init_in_memory({"partitions": 1})
    net = nn.Module()
    net.row = nn.Sequential(*(Block(width) for _ in range(blocks)))
    net.forward = net.row.forward  # type: ignore[method-assign]
    smp.DistributedModel(net)
    if strategy is not None:
        marked(strategy)(net)
    ours = {tensor.untyped_storage().data_ptr() for tensor in net.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.ones(16, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = net.row(x)
    assert y.requires_grad
    return sum(sizes.values())


def test_each_group_keeps_its_input_alone() -> None:
    one = 16 * 64 * 4
    assert kept_bytes(None) > 6 * 8 * one
    assert [kept_bytes(strategy) for strategy in ("each", "group_2", "group_4", "contiguous")] == [
        6 * one,
        3 * one,
        2 * one,
        one,
    ]


# What is in a group --------------------------------------------------------------------------------------


class Counting(Block):
    """Batch norm in training: its statistics are counted once."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Drawing(Block):
    """Draws from Python's stream too."""

    def forward(self, x: Tensor) -> Tensor:
        import random

        return super().forward(x * (1.0 + random.random()))


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y.float()


class Shared(Row):
    def __init__(self) -> None:
        super().__init__()
        self.row[3].up.weight = self.row[0].up.weight
        self.row[5].down = self.row[0].down


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Counting, Drawing, Autocast, Shared])
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_is_in_a_group_is_as_without(kind: Any, partitions: int) -> None:
    build = kind if kind is Shared else lambda: Row(kind)
    expected = in_memory(unmarked, build, partitions=partitions)
    for strategy in ("each", "group_4"):
        found = in_memory(marked(strategy), build, partitions=partitions)
        assert same(found, expected), strategy
        assert found["runs"] == 24, strategy


def test_hooks_of_a_sequential_run_once_and_its_children_stay_grouped() -> None:
    """Hooks of its own are around its forward; those of a child keep the child from being in a group."""
    calls: list[str] = []

    def with_hooks(net: Any) -> None:
        marked("contiguous")(net)
        net.row.register_forward_hook(lambda module, given, result: calls.append("row"))

    expected = in_memory(unmarked, partitions=2)
    found = in_memory(with_hooks, partitions=2)
    assert same(found, expected)
    assert found["runs"] == 24
    assert calls == ["row"] * 2 * 4  # two steps and two evaluations, two microbatches

    def with_inner_hooks(net: Any) -> None:
        marked("contiguous")(net)
        net.row[2].register_forward_hook(lambda module, given, result: result * 1.0)

    with pytest.warns(UserWarning, match=r"has forward hooks inside: its parts are each for themselves"):
        found = in_memory(with_inner_hooks, partitions=2)
    assert same(found, expected)
    assert found["runs"] == 24


def test_a_hook_that_changes_what_a_marked_module_is_given_runs_once() -> None:
    """Hooks are around what is computed again: the second run gets what the first one got."""

    def both(marks: bool) -> Mark:
        def hooked(net: Any) -> None:
            net.row[0].register_forward_pre_hook(lambda module, given: (given[0] * 2.0,))
            if marks:
                smp.set_activation_checkpointing(net.row)

        return hooked

    for partitions in (1, 2):
        expected = in_memory(both(False), partitions=partitions)
        found = in_memory(both(True), partitions=partitions)
        assert same(found, expected)


class Packed(nn.Module):
    """Takes one tuple and returns one, as SMP's transformer layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        assert type(given) is tuple
        x, mask = given
        return self.drop(torch.sigmoid(self.linear(x))) * mask, mask


class Packing(Row):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(*(Packed() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 3.0])
        return self.head(self.row((self.stem(x), mask))[0])


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 2])
def test_children_that_take_a_tuple(partitions: int) -> None:
    expected = in_memory(unmarked, Packing, partitions=partitions)
    for strategy in STRATEGIES:
        found = in_memory(marked(strategy, pack_args_as_tuple=True), Packing, partitions=partitions)
        assert same(found, expected), strategy
        assert found["runs"] == 24


def test_attributes_are_for_the_second_run_what_they_were() -> None:
    """Dropout is off in the rest of the step: the masks of the first run are drawn again all the same."""

    def gradients(mark: Mark, partitions: int) -> dict[str, Any]:
        smp.reset()
        smp.init_in_memory({"partitions": partitions, "microbatches": 2})
        torch.manual_seed(0)
        net = Row()
        model = smp.DistributedModel(net)
        mark(net)

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            net.train()
            y = model(x)
            float(y.sum())  # all of the forward has run by now
            net.eval()
            loss = y.square().mean()
            model.backward(loss)
            return loss

        loss = step(model, torch.linspace(-1, 1, 24).reshape(4, 6)).reduce_mean()
        return {"losses": [float(loss)], "state": {n: p.grad for n, p in net.named_parameters()}}

    for partitions in (1, 2):
        expected = gradients(unmarked, partitions)
        for strategy in ("each", "contiguous"):
            assert same(gradients(marked(strategy), partitions), expected)


def test_a_copy_has_groups_of_its_own() -> None:
    smp.init_in_memory({"partitions": 1})
    net = Row()
    smp.DistributedModel(net)
    marked("group_4")(net)
    stream = io.BytesIO()
    torch.save(net, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(net), torch.load(stream, weights_only=False)):
        twin.eval()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        y = twin(torch.ones(2, 6, requires_grad=True))
        assert torch.equal(y, torch.zeros(2, 2))
        y.sum().backward()
        assert twin.row[0].up.weight.grad is not None
        assert net.row[0].up.weight.grad is None
    assert list(net.state_dict()) == list(Row().state_dict())


def test_what_cannot_be_grouped_says_so() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    smp.init_in_memory({"partitions": 1})
    net = Row()
    net.other = Own(Block(), Block())
    model = smp.DistributedModel(net)
    with pytest.raises(smp.SMPError, match=r"Own has a forward of its own.*strategy='contiguous'.*'each'"):
        smp.set_activation_checkpointing(net.other, strategy="contiguous")
    smp.set_activation_checkpointing(net.other)
    with pytest.raises(smp.SMPError, match="this Row is no part of the model"):
        smp.set_activation_checkpointing(Row())
    marked("contiguous")(net)
    net.row[1] = nn.Sigmoid()
    with pytest.raises(smp.SMPError, match="the children of a Sequential have changed since"):
        model(torch.ones(2, 6))
    marked("contiguous")(net)
    model(torch.ones(2, 6))

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        smp.set_activation_checkpointing(net.row)

    with pytest.raises(smp.SMPError, match=r"called inside an smp\.step"):
        step(model, torch.ones(2, 6))


def test_groups_come_too_late_for_a_static_step() -> None:
    in_memory(unmarked, partitions=2, static_mode=True)
    with pytest.raises(smp.SMPError, match=r"static_mode has recorded its steps.*strategy='group_2'"):
        marked("group_2")(current().model.module)


class InnerCut(Row):
    """A child that holds most of the model, in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(Block(), nn.Sequential(*(Block() for _ in range(6))), Block())


def test_a_child_that_is_cut_runs_without_or_is_an_error() -> None:
    expected = in_memory(unmarked, InnerCut, partitions=2)
    with pytest.warns(UserWarning, match=r"row\.1 \(Sequential\) is cut over stages.*it runs without"):
        found = in_memory(marked("contiguous"), InnerCut, partitions=2)
    assert same(found, expected)

    def by_hand(net: Any) -> None:
        smp.set_partition(net.row[1][3], 1)
        marked("contiguous")(net)

    with pytest.raises(smp.SMPError, match=r"row\.1 \(Sequential\) is cut over stages.*place it whole"):
        in_memory(by_hand, InnerCut, partitions=2, auto_partition=False, default_partition=0)
