"""Trains a byte-level GPT, split over processes by smp_lite.

    smp-lite run --processes 4 \\
        --parameters '{"partitions": 2, "microbatches": 4, "ddp": true}' notebooks/train_gpt.py

Nothing here says which process holds which layer: that comes from the parameters, and the same
script runs with other values of them. What an SMP script adds to a plain loop is marked (1) to (6).

In a SageMaker job the text is the channel `train`, the weights go to the model folder and the losses
to the output folder, where the service looks for them. Elsewhere the text is the Python library's
source, and files are written only where the command line says so.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from gpt import GPT
from text import get_batch, read_text
from torch import Tensor
from torch.nn import functional as F

import smp_lite as smp


@smp.step  # (1) runs once per microbatch; arguments that are tensors arrive split
def train_step(model: smp.DistributedModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """One microbatch: tokens and targets int64 ``[b, T]``; returns its scalar loss."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.backward(loss)  # (2) in the place of loss.backward()
    return loss


def main() -> None:
    arguments = _parse_arguments()
    smp.init()  # (3) takes the parameters from the launcher
    torch.manual_seed(arguments.seed)  # the same weights in every process

    module = GPT(
        vocab_size=arguments.vocab_size,
        d_model=arguments.d_model,
        num_blocks=arguments.blocks,
        num_heads=arguments.heads,
        context=arguments.context,
    )
    model = smp.DistributedModel(module)  # (4) wraps the model and the optimizer
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.lr))

    text = read_text(folder=arguments.text)
    losses = []
    with smp.progress(arguments.steps, "training") as progress:
        for step in range(arguments.steps):
            # By dp rank, never by rank: the stages of one replica work on one batch.
            tokens, targets = get_batch(
                text,
                step,
                batch_size=arguments.batch_size,
                context=arguments.context,
                dp_rank=smp.dp_rank(),
                dp_size=smp.dp_size(),
            )
            optimizer.zero_grad()
            microbatch_losses = train_step(model, tokens, targets)
            optimizer.step()
            losses.append(microbatch_losses.reduce_mean().item())  # (5) one loss per microbatch
            progress.update(loss=losses[-1], samples=arguments.batch_size * smp.dp_size())
            if smp.should_stop():  # (6) the job is being stopped: true on all ranks after one step
                break

    if losses:
        _report(losses, arguments.losses)
    if arguments.save is not None and smp.dp_rank() == 0:
        state = model.state_dict(gather_to_rank0=True)  # by all stages of the replica
        if smp.rank() == 0:
            smp.save(state, str(arguments.save), partial=False)


def _report(losses: list[float], path: Path | None) -> None:
    """Means over the replicas, each of which saw other samples; collective over the dp group."""
    replica_losses = torch.tensor(smp.allgather(losses, smp.DP_GROUP))  # [dp_size, steps]
    if smp.rank() != 0:
        return
    mean_losses = replica_losses.mean(dim=0)
    print(
        f"loss of all replicas: {mean_losses[0]:.3f} at the first step, "
        f"{mean_losses[-10:].mean():.3f} over the last ten"
    )
    if path is not None:
        path.write_text(json.dumps(mean_losses.tolist()))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with smp_lite.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step and replica")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--vocab-size", type=int, default=256, help="entries of the model; bytes need 256")
    parser.add_argument("--d-model", type=int, default=128, help="width of the model")
    parser.add_argument("--blocks", type=int, default=4, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads in a block")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--text", type=Path, default=_of_the_job("SM_CHANNEL_TRAIN"), help="folder to read")
    parser.add_argument(
        "--save",
        type=Path,
        default=_of_the_job("SM_MODEL_DIR", "gpt.pt"),
        help="file for the trained weights",
    )
    parser.add_argument(
        "--losses",
        type=Path,
        default=_of_the_job("SM_OUTPUT_DATA_DIR", "losses.json"),
        help="file for the loss of each step, as a JSON list",
    )
    parser.add_argument("--mp_parameters", help="unused: SageMaker passes it to every script")
    return parser.parse_args()


def _of_the_job(variable: str, name: str = "") -> Path | None:
    """A folder, or a file in it, that a SageMaker job names in its environment; None outside of jobs."""
    folder = os.environ.get(variable)
    return Path(folder, name) if folder else None


if __name__ == "__main__":
    main()
