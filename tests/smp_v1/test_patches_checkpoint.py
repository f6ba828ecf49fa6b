"""``smp.patches.checkpoint``: single calls inside forward, and torch's own checkpoint there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import smp_lite as smp
from smp_lite.patches.checkpoint import checkpoint, checkpoint_sequential
from tests.harness import run_distributed
from tests.smp_v1.test_checkpointed_groups import Block, Packed, in_memory, same, trained, unmarked

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


class Net(nn.Module):
    """Six blocks, the way of whose calls is given."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.row = nn.Sequential(*(Block() for _ in range(4)))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self, self.stem(x)))


def plain(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return net.row(x)


def single(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x)
    return net.row(x)


def sequential(strategy: str) -> Callable[[Any, Tensor], Tensor]:
    def way(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, preserve_rng_state=True)
        return checkpoint_sequential(net.row, x, strategy=strategy)

    return way


def by_torch(use_reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def way(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = torch_checkpoint(block, x, use_reentrant=use_reentrant)
        return torch_checkpoint(net.row, x, use_reentrant=use_reentrant)

    return way


WAYS = {
    "single": (single, 16),
    "each": (sequential("each"), 24),
    "group_2": (sequential("group_2"), 24),
    "contiguous": (sequential("contiguous"), 24),
    "torch": (by_torch(False), 24),
    "torch, reentrant": (by_torch(True), 24),
}


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("parameters", [{"partitions": 1}, {"partitions": 2}, {"partitions": 3}], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_equal_to_the_bit_and_computed_twice(name: str, parameters: dict[str, Any]) -> None:
    way, runs = WAYS[name]
    expected = in_memory(unmarked, functools.partial(Net, plain), **parameters)
    found = in_memory(unmarked, functools.partial(Net, way), **parameters)
    if parameters["partitions"] > 1 or not name.startswith("torch"):
        # In one piece torch draws the masks of its own checkpoints as it likes.
        assert same(found, expected)
    assert found["runs"] == runs
    assert found["evaluation"] == 12


def on_ranks(name: str | None) -> dict[str, Any]:
    smp.init()
    return trained(unmarked, functools.partial(Net, plain if name is None else WAYS[name][0]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["group_2", "torch, reentrant"])
def test_on_real_ranks(name: str) -> None:
    parameters = {"partitions": 2, "microbatches": 2}
    expected = run_distributed(f"{__name__}:on_ranks", 2, kwargs={"name": None}, parameters=parameters)
    found = run_distributed(f"{__name__}:on_ranks", 2, kwargs={"name": name}, parameters=parameters)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(rank["runs"] for rank in found) == 24


class Packing(nn.Module):
    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.row = nn.Sequential(*(Packed() for _ in range(4)))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.row, (x, torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 3.0])))[0]


def test_a_tuple_must_be_asked_for() -> None:
    expected = in_memory(unmarked, lambda: Packing(lambda row, given: row(given)), partitions=2)
    packed = functools.partial(checkpoint_sequential, strategy="group_2", pack_args_as_tuple=True)
    found = in_memory(unmarked, lambda: Packing(packed), partitions=2)
    assert same(found, expected)
    assert found["runs"] == 2 * expected["runs"]
    with pytest.raises(TypeError, match=r"the input is a tuple.*pack_args_as_tuple=True"):
        in_memory(unmarked, lambda: Packing(checkpoint_sequential), partitions=2)


def test_wrong_arguments_name_themselves() -> None:
    with pytest.raises(TypeError, match=r"checkpoint takes a module.*got <built-in method tanh"):
        checkpoint(torch.tanh, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"checkpoint_sequential takes an nn\.Sequential, got Linear"):
        checkpoint_sequential(nn.Linear(2, 2), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strategy='all' must be 'each'"):
        checkpoint_sequential(nn.Sequential(), torch.ones(2), strategy="all")


def test_a_plain_model_runs_as_it_is() -> None:
    """Before ``smp.DistributedModel`` a script may try its model out."""
    net = Net(sequential("contiguous")).eval()
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    with mock.patch.object(torch, "sigmoid", wraps=torch.sigmoid) as sigmoid:
        y = net(x)
        y.sum().backward()
    assert sigmoid.call_count == 12
    net.way = plain
    assert torch.equal(net(x), y)


def test_a_module_that_is_cut_runs_without_or_is_an_error() -> None:
    def way(net: Any, x: Tensor) -> Tensor:
        return checkpoint(net.row, plain(net, x))

    build = functools.partial(Net, way)
    with pytest.warns(UserWarning, match=r"checkpoint: row \(Sequential\) is cut over stages.*without"):
        in_memory(unmarked, build, partitions=3)

    def by_hand(net: Any) -> None:
        smp.set_partition(net.row[1], 1)

    with pytest.raises(smp.SMPError, match=r"checkpoint: row \(Sequential\) is cut over stages.*place it"):
        in_memory(by_hand, build, partitions=2, auto_partition=False, default_partition=0)


def test_the_names_scripts_know() -> None:
    assert smp.patches.checkpoint.checkpoint is checkpoint
    found = importlib.import_module("smp_lite.on_path.smdistributed.modelparallel.torch.patches.checkpoint")
    assert found.checkpoint_sequential is checkpoint_sequential
