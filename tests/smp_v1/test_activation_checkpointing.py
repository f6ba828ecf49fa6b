"""``smp.set_activation_checkpointing``: the same to the bit, computed twice, and kept less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.harness import run_distributed

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


class Block(nn.Module):
    """With dropout and a keyword; its only sigmoid tells how often it runs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(width, 8 * width), nn.Dropout(0.3)
        self.down = nn.Linear(8 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(self.drop(torch.sigmoid(self.up(x))))


class Packed(nn.Module):
    """Takes one tuple and returns one, as SMP's transformer layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = given
        return torch.tanh(self.linear(x)) * mask, mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.row = nn.Sequential(Block(), Block())
        self.packed = nn.Sequential(Packed(), Packed())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.packed((self.row(x), torch.ones_like(x)))[0]


def mark_blocks(net: Net) -> None:
    for block in net.blocks:
        smp.set_activation_checkpointing(block)


def mark_all(net: Net) -> None:
    mark_blocks(net)
    smp.set_activation_checkpointing(net.row, strategy="contiguous")
    smp.set_activation_checkpointing(net.packed, pack_args_as_tuple=True, strategy="group_2")


def mark_sublayers(net: Net) -> None:
    for block in net.blocks:
        smp.set_activation_checkpointing(block.up)
        smp.set_activation_checkpointing(block.down)


def trained(mark: Callable[[Any], None], steps: int = 3) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
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

    losses = []
    with mock.patch.object(torch, "sigmoid", wraps=torch.sigmoid) as sigmoid:
        for i in range(steps):
            sigmoid.reset_mock()
            optimizer.zero_grad()
            losses.append(float(train_step(model, torch.linspace(-1, i, 24).reshape(4, 6)).reduce_mean()))
            optimizer.step()
        runs = sigmoid.call_count  # of the last step: the first ones describe the blocks as well
        model.eval()
        for _ in range(2):
            sigmoid.reset_mock()
            with torch.no_grad():
                test_step(model, torch.ones(4, 6))
    return {"losses": losses, "state": model.state_dict(), "runs": runs, "evaluation": sigmoid.call_count}


PARAMETERS: dict[str, Any] = {"partitions": 2, "microbatches": 2}


def in_memory(mark: Callable[[Any], None], **parameters: Any) -> dict[str, Any]:
    smp.reset()
    smp.init_in_memory({**PARAMETERS, **parameters})
    return trained(mark)


def on_ranks(marked: bool) -> dict[str, Any]:
    smp.init()
    return trained(mark_all if marked else lambda net: None)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["losses"] == b["losses"] and all(
        torch.equal(value, b["state"][name]) for name, value in a["state"].items()
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("mark", "runs"), [(mark_blocks, 12), (mark_all, 16), (mark_sublayers, 8)])
@pytest.mark.parametrize(
    "parameters", [{}, {"partitions": 1}, {"pipeline": "simple", "partitions": 4}, {"static_mode": True}]
)
def test_equal_to_the_bit_and_computed_twice(
    mark: Callable[[Any], None], runs: int, parameters: dict[str, Any]
) -> None:
    """Dropout draws the same numbers when it runs again."""
    expected = in_memory(lambda net: None, **parameters)
    found = in_memory(mark, **parameters)
    assert same(found, expected)
    assert expected["runs"] == 8  # four blocks, two microbatches
    assert found["runs"] == runs
    assert found["evaluation"] == expected["evaluation"] == 8  # nothing is computed twice without gradients


def test_on_real_ranks() -> None:
    expected = run_distributed(f"{__name__}:on_ranks", 2, kwargs={"marked": False}, parameters=PARAMETERS)
    found = run_distributed(f"{__name__}:on_ranks", 2, kwargs={"marked": True}, parameters=PARAMETERS)
    for rank in range(2):
        assert same(found[rank], expected[rank])
    assert sum(rank["runs"] for rank in found) == 16


def test_less_is_kept_for_backward() -> None:
    """Bytes that autograd saves, as autograd itself tells."""

    def kept(mark: Callable[[Any], None]) -> int:
        smp.reset()
        smp.init_in_memory({"partitions": 1})
        net = nn.Sequential(*(Block(32) for _ in range(6)))
        model = smp.DistributedModel(net)
        mark(net)
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        x = torch.ones(16, 32, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.module(x).sum()
        return total

    assert kept(smp.set_activation_checkpointing) < kept(lambda net: None) / 4


def test_a_copy_computes_with_its_own_weights() -> None:
    smp.init_in_memory(PARAMETERS)
    net = Net()
    smp.DistributedModel(net)
    mark_all(net)
    twin = copy.deepcopy(net).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(torch.ones(2, 6, requires_grad=True)), torch.zeros(2, 6))


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def run_cut(**parameters: Any) -> None:
    smp.init_in_memory({**PARAMETERS, **parameters})
    net = Cut()
    model = smp.DistributedModel(net)
    if parameters:
        smp.set_partition(net.inner.row, 1)
    smp.set_activation_checkpointing(net.inner)

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    train_step(model, torch.ones(4, 6))


def test_a_module_that_is_cut_runs_without_or_is_an_error() -> None:
    """As in SMP: a warning where the library has cut it, an error where the user has."""
    with pytest.warns(UserWarning, match=r"inner \(Net\) is cut over stages.*it runs without"):
        run_cut()
    smp.reset()
    with pytest.raises(smp.SMPError, match=r"inner \(Net\) is cut over stages.*place it whole"):
        run_cut(auto_partition=False, default_partition=0)


class WithNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("factor", torch.ones(6))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(self.norm(x), scale) * self.factor


class ChangesInput(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x.mul_(0.5), scale)


class ChangesBuffer(WithNorm):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.factor.mul_(0.5)
        return super().forward(x, scale)


def step_of(kind: type[nn.Module], marked: bool, between: Callable[[Any], None], **parameters: Any) -> Any:
    """Loss and state after one step of four blocks; ``between`` the call of the model and its backward."""
    smp.reset()
    smp.init_in_memory({**PARAMETERS, **parameters})
    torch.manual_seed(0)
    net = nn.Sequential(*(kind() for _ in range(4)))
    model = smp.DistributedModel(net)
    if marked:
        smp.set_activation_checkpointing(net)

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        y = model(x * 1.0)
        between(net)
        loss = y.square().mean()
        model.backward(loss)
        return loss

    loss = train_step(model, torch.linspace(-1, 1, 24).reshape(4, 6)).reduce_mean()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"losses": [float(loss)], "state": {**gradients, **model.state_dict()}}


@pytest.mark.parametrize(("partitions", "microbatches"), [(1, 1), (2, 1), (2, 2)])
def test_running_statistics_are_counted_once(partitions: int, microbatches: int) -> None:
    """torch's own checkpoint counts them once more with every backward."""
    parameters = {"partitions": partitions, "microbatches": microbatches}
    found, expected = (step_of(WithNorm, marked, lambda net: None, **parameters) for marked in (True, False))
    assert same(found, expected)
    assert int(found["state"]["0.norm.num_batches_tracked"]) == microbatches


@pytest.mark.parametrize(
    ("kind", "says"),
    [(ChangesInput, "changes its argument 0"), (ChangesBuffer, "changes factor")],
)
def test_a_call_that_would_change_something_twice_is_refused(kind: type[nn.Module], says: str) -> None:
    with pytest.raises(smp.SMPError, match=f"a call of {kind.__name__} {says}, and would do so again"):
        step_of(kind, True, lambda net: None)


def test_what_has_changed_before_it_runs_again_is_an_error() -> None:
    """Without checkpointing autograd notices; torch's own checkpoint computes with the new numbers."""

    def change(net: Any) -> None:
        with torch.no_grad():
            net[1].factor.mul_(3.0)

    with pytest.raises(
        smp.SMPError, match="factor of WithNorm has changed between the call and its backward"
    ):
        step_of(WithNorm, True, change, microbatches=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_of(WithNorm, False, change, microbatches=1)


def test_wrong_arguments_name_themselves() -> None:
    smp.init_in_memory(PARAMETERS)
    net = Net()
    with pytest.raises(smp.SMPError, match=r"wrap the model with smp\.DistributedModel first"):
        smp.set_activation_checkpointing(net.row)
    smp.DistributedModel(net)
    with pytest.raises(TypeError, match="needs a module, got <class"):
        smp.set_activation_checkpointing(Block)  # type: ignore[arg-type]
    for strategy in ("every", "group_0", "group_", 2):
        with pytest.raises(ValueError, match="must be 'each', 'contiguous' or 'group_n'"):
            smp.set_activation_checkpointing(net.row, strategy=strategy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"are for nn\.Sequential, and this is a Block"):
        smp.set_activation_checkpointing(net.blocks[0], strategy="contiguous")
