"""Trains the byte-level GPT from whatever configuration the job is started with.

    smp-lite run --processes 4 --config colossal.py notebooks/train_systems.py

Nothing here says which system's configuration it is. A step trains on the same samples whatever the ranks
are: each replica takes its share of them, and where a configuration takes several batches of the loader for
a step, ``--batch-size`` says how small these are. ``--plain`` is the same loop in one process without the
library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from text import get_batch, read_text
from torch import Tensor
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.checkpoints.portable.pieces import boxes_of
from smp_lite.nn.layout import layout_of

SAMPLES, CONTEXT, RATE = 16, 64, 1e-3


def samples(
    num_steps: int, batch_size: int, replica: int = 0, num_replicas: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """One replica's batches: (tokens, targets), int64 ``[batch_size, CONTEXT]``."""
    text = read_text(max_bytes=1_000_000)
    share = SAMPLES // num_replicas
    for step in range(num_steps):
        batch = get_batch(
            text, step, batch_size=share, context=CONTEXT, dp_rank=replica, dp_size=num_replicas
        )
        yield from zip(*(part.split(batch_size) for part in batch), strict=True)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits ``[B, T, V]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(num_steps: int, batch_size: int) -> tuple[list[float], list[list[dict[str, Any]]]]:
    """In the ranks of a job. Returns the loss of each step, and what each rank holds."""
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(GPT(context=CONTEXT))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=RATE))

    @smp.step
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(tokens), targets)
        model.backward(loss)
        return loss

    losses = []
    loader = samples(num_steps, batch_size, smp.rdp_rank(), smp.rdp_size())
    for tokens, targets in smp.batches(loader):
        optimizer.zero_grad()
        losses.append(train_step(tokens, targets).reduce_mean().item())
        optimizer.step()
    of_ranks = torch.tensor(smp.allgather(losses))  # each replica's mean over its own samples
    return of_ranks.double().mean(0).tolist(), smp.allgather(held(model))


def train_plain(num_steps: int, num_parts: int = 1) -> list[float]:
    """In one process, in plain torch. With parts, gradients of that many parts of a batch are added up: equal
    but for rounding."""
    torch.manual_seed(0)
    model = GPT(context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for tokens, targets in samples(num_steps, SAMPLES):
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
            loss = loss_of(model(part), wanted) / num_parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def held(model: smp.DistributedModel) -> list[dict[str, Any]]:
    """The parameters that lie on this rank: where in the whole tensor, and how many numbers."""
    found = []
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        shape = list(parameter.shape if layout is None else layout.shape)
        boxes = [(list(box.offsets), list(box.sizes)) for box in boxes_of(layout, shape)]
        found.append({"name": name, "shape": shape, "numel": parameter.numel(), "boxes": boxes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT from any configuration.")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=SAMPLES, help="samples in a batch of the loader")
    parser.add_argument("--plain", action="store_true", help="in one process, without the library")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for losses and holdings")
    arguments = parser.parse_args()
    if arguments.plain:
        losses, ranks = train_plain(arguments.steps), []
    else:
        losses, ranks = train(arguments.steps, arguments.batch_size)
    if arguments.plain or smp.rank() == 0:
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
        arguments.output.write_text(json.dumps({"losses": losses, "ranks": ranks}))


if __name__ == "__main__":
    main()
