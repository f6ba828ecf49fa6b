"""`smp.partition`, `smp.set_partition` and `default_partition`: who lands on which stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.api_support import batch, in_memory, train

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")  # of the tiny nets' balance

MANUAL = {"auto_partition": False, "default_partition": 0}


class Chain(nn.Module):
    """Its constructor places blocks the way SMP scripts do, in a loop."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for i in range(num_blocks):
            with smp.partition(int(i >= num_blocks // 2)):
                self.blocks.append(nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stages_of(module: nn.Module) -> dict[str, int]:
    """Stage by module name, after a first step."""
    model = smp.DistributedModel(module)
    train(model, *batch())
    return dict(model.partition.stage_of)


def test_a_constructor_loop_places_each_block_and_the_rest_goes_to_the_default() -> None:
    in_memory(**MANUAL)
    stages = stages_of(Chain())
    assert [stages[f"blocks.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert stages["head"] == 0


def test_the_default_partition_takes_what_no_context_names() -> None:
    in_memory(auto_partition=False, default_partition=1)
    stages = stages_of(Chain())
    assert stages["head"] == stages[""] == stages["blocks"] == 1
    assert [stages[f"blocks.{i}"] for i in range(4)] == [0, 0, 1, 1]


def test_the_innermost_context_wins_and_the_outer_one_is_back_after_it() -> None:
    in_memory(3, **MANUAL)
    with smp.partition(1):
        before = nn.Linear(4, 4)
        with smp.partition(2), smp.partition(0):
            inner = nn.Linear(4, 4)
        after = nn.Linear(4, 4)
    stages = stages_of(nn.Sequential(before, inner, after, nn.Linear(4, 1)))
    assert [stages[str(i)] for i in range(4)] == [1, 0, 1, 0]


def test_children_constructed_inside_go_along_unless_placed_themselves() -> None:
    in_memory(**MANUAL)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(4, 4)
            with smp.partition(0):
                self.placed = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.placed(self.plain(x))

    with smp.partition(1):
        block = Block()
    assert stages_of(block) == {"": 1, "plain": 1, "placed": 0}


def test_copies_made_inside_a_context_belong_to_it() -> None:
    # nn.TransformerEncoder deep-copies its layer, and a copy is made without calling __init__.
    in_memory(**MANUAL)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with smp.partition(1):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), encoder, nn.Linear(4, 1)))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    step(model, torch.randn(2, 3, 4))
    stages = model.partition.stage_of
    assert {stage for name, stage in stages.items() if name.startswith("1")} == {1}
    assert stages["0"] == stages["2"] == 0


def test_a_context_ends_with_an_exception_and_leaves_module_as_it_was() -> None:
    in_memory(**MANUAL)
    births = nn.Module.__init__, nn.Module.__setstate__
    with pytest.raises(KeyError), smp.partition(1):
        raise KeyError
    assert (nn.Module.__init__, nn.Module.__setstate__) == births
    stages = stages_of(nn.Sequential(nn.Linear(4, 1)))
    assert stages == {"": 0, "0": 0}


def test_contexts_are_ignored_under_auto_partition() -> None:
    in_memory()
    with smp.partition(1):
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 1))
    assert set(stages_of(net).values()) == {0, 1}


@pytest.mark.parametrize("index", [2, -1, True, "0", 1.0])
def test_an_index_out_of_range_is_an_error_even_under_auto_partition(index: Any) -> None:
    in_memory()
    with pytest.raises(ValueError, match=r"partitions=2, so the index must be an int from 0 to 1"):
        smp.partition(index).__enter__()


def test_set_partition_places_a_module_with_everything_in_it() -> None:
    in_memory(**MANUAL)
    net = Chain()
    model = smp.DistributedModel(net)
    smp.set_partition(net.blocks, 1)
    smp.set_partition(net.blocks[3], 0)
    train(model, *batch())
    stages = model.partition.stage_of
    assert [stages[f"blocks.{i}"] for i in range(4)] == [1, 1, 1, 0]


def test_set_partition_wins_over_a_context() -> None:
    in_memory(**MANUAL)
    with smp.partition(1):
        first = nn.Linear(4, 4)
    smp.set_partition(first, 0)
    with smp.partition(1):
        last = nn.Linear(4, 1)
    assert stages_of(nn.Sequential(first, last)) == {"": 0, "0": 0, "1": 1}


def test_set_partition_refuses_a_wrong_index_and_a_partitioned_model() -> None:
    in_memory(**MANUAL)
    net = Chain()
    with pytest.raises(ValueError, match=r"partitions=2, so the index must be an int from 0 to 1"):
        smp.set_partition(net, 2)
    stages_of(net)
    with pytest.raises(smp.SMPError, match="after the first step"):
        smp.set_partition(net, 1)


def test_set_partition_means_nothing_with_auto_partition_or_one_partition() -> None:
    """AWS's scripts call it after wrapping, whatever the launcher has made of the parameters."""
    in_memory()
    net = Chain()
    smp.set_partition(net, 1)
    assert 0 in stages_of(net).values()
    smp.reset()
    in_memory(**{**MANUAL, "partitions": 1})
    net = nn.Linear(4, 1)
    model = smp.DistributedModel(net)
    assert model.partitioned
    smp.set_partition(net, 0)


def test_tied_weights_on_two_stages_are_an_error_that_names_both_modules() -> None:
    in_memory(**MANUAL)
    with smp.partition(1):
        last = nn.Linear(4, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), last, nn.Linear(4, 1))
    net[0].weight = last.weight
    with pytest.raises(ValueError, match=r"modules '0' \(stage 0\) and '2' \(stage 1\) share"):
        stages_of(net)


def test_tied_weights_on_one_stage_are_fine() -> None:
    in_memory(**MANUAL)
    with smp.partition(1):
        ends = nn.Linear(4, 4), nn.Linear(4, 4)
    ends[0].weight = ends[1].weight
    stages = stages_of(nn.Sequential(ends[0], nn.Linear(4, 4), ends[1], nn.Linear(4, 1)))
    assert [stages[str(i)] for i in range(4)] == [1, 0, 1, 0]


def test_partition_needs_a_session() -> None:
    with pytest.raises(smp.SMPError, match=r"smp\.init\(\)"):
        smp.partition(0).__enter__()


def test_a_stored_decision_is_used_again_and_must_fit_the_model(tmp_path: Any) -> None:
    file = str(tmp_path / "partition.json")
    in_memory(partition_file=file, **MANUAL)
    written = stages_of(Chain())
    smp.reset()
    in_memory(partition_file=file, load_partition=True)
    assert stages_of(Chain()) == written
    smp.reset()
    in_memory(partition_file=file, load_partition=True)
    with pytest.raises(ValueError, match=r"has no stage for 'blocks\.4'"):
        stages_of(Chain(num_blocks=5))
    smp.reset()
    in_memory(3, partition_file=file, load_partition=True)
    with pytest.raises(smp.SMPError, match="holds 2 partitions, but partitions=3"):
        stages_of(Chain())
