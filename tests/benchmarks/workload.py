"""The GPT that most benchmarks train, split evenly by blocks, and how the library runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import smp_lite as smp
from notebooks.gpt import GPT

__all__ = ["Workload", "next_byte_loss", "train_step"]

_VOCAB_SIZE = 256


@dataclass(frozen=True)
class Workload:
    """A GPT and its batch. The numbers are a model's d, blocks and T, and B samples a step."""

    d_model: int
    num_blocks: int
    length: int
    batch_size: int
    num_microbatches: int = 8

    def __str__(self) -> str:
        return f"d {self.d_model}, {self.num_blocks} blocks, T {self.length}, B {self.batch_size}"

    def model(self) -> GPT:
        """The same weights at every call."""
        torch.manual_seed(0)
        return GPT(
            vocab_size=_VOCAB_SIZE,
            d_model=self.d_model,
            num_blocks=self.num_blocks,
            num_heads=max(1, self.d_model // 64),
            context=self.length,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 ``[B, T]``; the same values at every call."""
        text = torch.randint(
            _VOCAB_SIZE,
            (self.batch_size, self.length + 1),
            generator=torch.Generator().manual_seed(1),
        )
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def stage_of_block(self, block_index: int, num_stages: int) -> int:
        """Equal runs of blocks; the embeddings go with the first, the head with the last."""
        return block_index * num_stages // self.num_blocks

    def parameters(self, num_stages: int, pipeline: str) -> dict[str, Any]:
        """The SMP parameters for this workload."""
        return {
            "partitions": num_stages,
            "microbatches": self.num_microbatches,
            "pipeline": pipeline,
            "auto_partition": False,
            "default_partition": 0,
        }

    def distributed(self, num_stages: int, pieces: Sequence[int] = ()) -> smp.DistributedModel:
        """The wrapped model with its blocks assigned to stages.

        Args:
            num_stages: of the session.
            pieces: the stage of each of several pieces; empty: one for each stage.
        """
        pieces = pieces or range(num_stages)
        model = self.model()
        wrapped = smp.DistributedModel(model)
        for index, block in enumerate(model.blocks):
            smp.set_partition(block, pieces[self.stage_of_block(index, len(pieces))])
        for module in (model.norm, model.head):
            smp.set_partition(module, pieces[-1])
        return wrapped


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits ``[B, T, V]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(recorded: list[float]) -> Callable[..., Any]:
    """A step function (model, tokens, targets) -> loss.

    It appends to `recorded` when each microbatch's recording ends (``time.perf_counter`` seconds):
    the last of a step's entries is where recording is over and execution begins.
    """

    @smp.step
    def step(model: smp.DistributedModel, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(model(tokens), targets)
        model.backward(loss)
        recorded.append(time.perf_counter())
        return loss

    return step
