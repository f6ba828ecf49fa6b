"""What is planned for graphs of a device: for microbatches in flight, not for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.plan.step.memory import format_memory_table
from smp_lite.preview.memory_preview import MemoryPreview
from smp_lite.runtime.graphs.stage_graphs import GRAPHS_VARIABLE
from tests.unit.views.test_memory_preview import Two, preview

WIDTH, ROWS = 64, 5  # of a microbatch, of 8
VALUE = 4 * WIDTH * ROWS
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
LOSS = 4


def net(*more: nn.Module) -> nn.Module:
    """The first layer is stage 0's."""
    with smp.partition(1):
        second = nn.Sequential(nn.Linear(WIDTH, WIDTH), *more)
    return Two(nn.Linear(WIDTH, WIDTH), second)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans with graphs, or without."""

    def found(graphs: bool, *more: nn.Module, **parameters: Any) -> MemoryPreview:
        monkeypatch.setenv(GRAPHS_VARIABLE, str(int(graphs)))
        given: dict[str, Any] = {
            "microbatches": 8,
            "pipeline": "interleaved",
            "static_mode": True,
            "auto_partition": False,
            "default_partition": 0,
        }
        return preview(lambda: net(*more), torch.ones(8 * ROWS, WIDTH), **(given | parameters))

    return found


def test_each_in_flight_holds_what_comes_in_and_goes_out_and_gradients(planned: Any) -> None:
    with_graphs, without = planned(True), planned(False)
    # What it is given and makes, the gradient of that, and of the layer; two are in flight there.
    assert with_graphs.stages[0].graphs == 2 * (3 * VALUE + LAYER)
    # The value and its gradient, the loss and its: one.
    assert with_graphs.stages[1].graphs == 2 * VALUE + 2 * LOSS + LAYER
    assert [stage.graphs for stage in without.stages] == [0, 0]
    for ours, theirs in zip(with_graphs.stages, without.stages, strict=True):
        assert ours.total > theirs.total
    assert "memory for 2, 1 graphs of forwards (by stage)" in with_graphs.notes[-1]
    assert "graphs" in format_memory_table(with_graphs.stages).splitlines()[0]
    assert "graphs" not in format_memory_table(without.stages)


def test_all_in_flight_have_their_own(planned: Any) -> None:
    found = planned(True, pipeline="simple")
    assert found.stages[0].graphs == 8 * (3 * VALUE + LAYER)


def test_what_is_no_graph_holds_nothing(planned: Any) -> None:
    found = planned(True, nn.Dropout(0.5))
    assert found.stages[0].graphs > 0
    assert found.stages[1].graphs == 0
    assert "draws random numbers" in found.notes[-1]


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"offload_activations": True}, "activations are offloaded"),
        ({"pipeline": "zero_bubble"}, "gradients of weights may come in actions of their own"),
        ({"ddp": True, "sharded_data_parallel_degree": 2}, "parameters are sharded"),
    ],
)
def test_where_there_are_none_a_note_says_so(planned: Any, parameters: dict[str, Any], reason: str) -> None:
    found = planned(True, **parameters)
    assert [stage.graphs for stage in found.stages] == [0, 0]
    assert f"{GRAPHS_VARIABLE}=1: no graphs, since {reason}" in found.notes[-1]


def test_without_static_mode_there_are_none(planned: Any) -> None:
    found = planned(True, static_mode=False)
    assert [stage.graphs for stage in found.stages] == [0, 0]
    assert not any(GRAPHS_VARIABLE in note for note in found.notes)
