"""Which stages count as alike, and that what one of them shows is what each would have shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.lifecycle.starting import planning
from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.step.lowering import lower
from smp_lite.preview.alike_stages import Likeness, alike
from smp_lite.preview.memory_preview import MemoryPreview, preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.session import current

NUM_STAGES = 6


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(x)))


def planned(change: Callable[[list[Block]], None]) -> tuple[MemoryPreview, list[Any]]:
    """The memory of six blocks on six stages, and the description of each stage."""
    blocks = [Block(number) for number in range(NUM_STAGES)]
    change(blocks)
    parameters = {
        "partitions": NUM_STAGES,
        "microbatches": 3,
        "auto_partition": False,
        "default_partition": 0,
    }
    with planning(parameters, stop_when_planned):
        smp.init()
        for number, block in enumerate(blocks):
            smp.set_partition(block, number)
        model = smp.DistributedModel(nn.Sequential(*blocks))
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).sum())

        with pytest.raises(PlanReady) as ready:
            step(model, torch.zeros(6, 8))
        placement = current().model.runtime.placement
        recording = ready.value.recordings[0]
        work = Work(0, recording.graph())
        lists = lower(compute_order([work], Policy()), [work], NUM_STAGES)
        described = [
            Likeness(stage, placement).of(recording, work.graph, lists[stage]) for stage in range(NUM_STAGES)
        ]
        found = preview_memory(current(), ready.value.batch, ready.value.recordings, ready.value.inputs)
    return found, described


def stages_like(described: list[Any], stage: int) -> list[int]:
    return [other for other in range(NUM_STAGES) if alike(described[other], described[stage])]


def test_blocks_in_the_middle_are_alike_but_for_their_number() -> None:
    _, described = planned(lambda blocks: None)
    assert stages_like(described, 2) == [1, 2, 3, 4]
    assert stages_like(described, 0) == [0]
    assert stages_like(described, NUM_STAGES - 1) == [NUM_STAGES - 1]


def wider(block: Block) -> None:
    block.inner, block.outer = nn.Linear(8, 32), nn.Linear(32, 8)


def other_attribute(block: Block) -> None:
    block.number = 3  # type: ignore[assignment]


def frozen(block: Block) -> None:
    block.inner.requires_grad_(False)


def with_buffer(block: Block) -> None:
    block.outer.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize("change", [wider, other_attribute, frozen, with_buffer])
def test_another_block_is_not_like_the_others(change: Callable[[Block], None]) -> None:
    _, described = planned(lambda blocks: change(blocks[3]))
    assert stages_like(described, 3) == [3]
    assert stages_like(described, 2) == [1, 2, 4]


def test_what_one_stage_shows_each_would_show() -> None:
    """An attribute that nothing reads makes every stage play for itself."""

    def mark(blocks: list[Block]) -> None:
        for number, block in enumerate(blocks):
            block.mark = number  # type: ignore[assignment]

    one_for_all, _ = planned(lambda blocks: None)
    each, described = planned(mark)
    assert stages_like(described, 2) == [2]
    assert one_for_all == each
    assert one_for_all.stages[2].kept > 0
