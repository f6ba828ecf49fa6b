"""The peak of a step with checkpointed blocks, by torch's own allocator, against what must be kept."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from notebooks.gpt import GPT
from tests.allocated import memory_profile, most_and_left

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")

WIDTH, CONTEXT, BATCH = 64, 32, 4
INPUT = BATCH * CONTEXT * WIDTH * 4
"""Bytes that a block is given, for one microbatch."""


class InSequence(nn.Module):
    """The notebooks' GPT with its blocks in an ``nn.Sequential``."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        gpt = GPT(vocab_size=32, d_model=WIDTH, num_blocks=num_blocks, num_heads=2, context=CONTEXT)
        self.blocks = nn.Sequential(*gpt.blocks)
        self.stem = nn.Embedding(32, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.stem(tokens))


def peak(strategy: str | None, num_blocks: int, microbatches: int = 1, **parameters: Any) -> int:
    """Bytes on top of parameters and gradients, in the third step and those after it: the median of three."""
    smp.reset()
    smp.init_in_memory({"partitions": 1, "microbatches": microbatches, "pipeline": "simple", **parameters})
    torch.manual_seed(0)
    net = InSequence(num_blocks)
    model = smp.DistributedModel(net)
    if strategy is not None:
        smp.set_activation_checkpointing(net.blocks, strategy=strategy)

    @smp.step
    def step(model: Any, tokens: Tensor) -> None:
        model.backward(model(tokens).square().mean())

    tokens = torch.arange(BATCH * microbatches * CONTEXT).reshape(-1, CONTEXT) % 32
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step(model, tokens)
    found = []
    for _ in range(3):  # a stray allocation of torch's own was once in one of them
        gc.collect()
        with memory_profile() as profile:
            step(model, tokens)
        found.append(most_and_left(profile)[0])
    return statistics.median(found)


@pytest.mark.slow
def test_the_peak_of_24_blocks() -> None:
    """Kept inputs of groups, and what one group computes inside; each block more costs one input, or half."""
    one, plain = peak(None, 1), peak(None, 24)
    inner = (plain - one) / 23  # what a block keeps
    assert inner > 10 * INPUT
    for strategy, size in (("each", 1), ("group_2", 2)):
        shorter, found = peak(strategy, 12), peak(strategy, 24)
        assert (found - shorter) / 12 == pytest.approx(INPUT / size, rel=0.02), strategy
        formula = 24 / size * INPUT + one + (size - 1) * inner
        assert found == pytest.approx(formula, rel=0.1), strategy
    assert peak("each", 24) < plain / 4


@pytest.mark.thorough
def test_the_peak_of_offloaded_blocks() -> None:
    """Six microbatches are in flight: without offloading all their inputs are in memory, with it three."""
    kept, offloaded = (
        peak("each", 24, microbatches=6, offload_activations=offload, activation_loading_horizon=1)
        for offload in (False, True)
    )
    assert kept - peak("each", 24) == pytest.approx(5 * 24 * INPUT, rel=0.05)
    assert kept - offloaded > 0.95 * 3 * 24 * INPUT
