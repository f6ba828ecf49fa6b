"""What the tests of checkpoints that change their layout run in the ranks.

The model has what a layout can do to a parameter: a vocabulary that is padded and tied to the output, a
matrix of three that are split each for itself, rows, columns, and what every rank holds whole. A step's batch
is the same in all layouts, so the dense model's losses are everybody's.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.checkpoints.portable import loading as portable_loading
from smp_lite.checkpoints.portable import reading as portable_reading
from smp_lite.nn.guarding import plain as plain_of
from smp_lite.nn.one_d import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from smp_lite.session import current
from tests.launch.api.api_cases import error_of

WIDTH, VOCABULARY, BATCH, TOKENS = 8, 11, 8, 3


class Mixer(nn.Module):
    """Three matrices in one, whose parts are used together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.scale * self.out(torch.sigmoid(q) * k + v)


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Mixer(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).double()


def split(net: Net, axis: Any) -> None:
    net.embed = VocabParallelEmbedding.from_dense(net.embed, axis)
    net.head = ColumnParallelLinear.from_dense(net.head, axis, pad=True, gather_output=True)
    net.head.weight = net.embed.weight
    for block in net.blocks:
        width = block.out.in_features
        block.qkv = ColumnParallelLinear.from_dense(block.qkv, axis, sections=(width,) * 3)
        block.out = RowParallelLinear.from_dense(block.out, axis)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.01,
    )


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    ids = torch.randint(VOCABULARY, (2, BATCH, TOKENS), generator=generator)
    return ids[0], ids[1]


def loss_of(net: nn.Module, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), wanted.flatten())


def plain_step(net: nn.Module, optim: torch.optim.Optimizer, index: int) -> float:
    """The same step in one process, with the same two microbatches."""
    optim.zero_grad()
    losses = []
    for part in zip(*(each.chunk(2) for each in batch(index)), strict=True):
        loss = loss_of(net, *part)
        (loss / 2).backward()
        losses.append(loss.detach())
    optim.step()
    return torch.stack(losses).mean().item()


def start(parameters: dict[str, Any], seed: int, **options: Any) -> tuple[Any, Any]:
    smp.init(parameters)
    net = build(seed, **options)
    split(net, current().axis("tp"))
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(adamw(model))


@smp.step
def train(model: Any, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, ids, wanted)
    model.backward(loss)
    return loss


def run(model: Any, optim: Any, indices: range) -> list[float]:
    """The losses of this replica's share of each batch."""
    losses = []
    for index in indices:
        optim.zero_grad()
        share = [each.chunk(smp.rdp_size())[smp.rdp_rank()] for each in batch(index)]
        losses.append(train(model, *share).reduce_mean().item())
        optim.step()
    return losses


def save(parameters: dict[str, Any], folder: str, tag: str) -> dict[str, Any]:
    """Two steps, a save, two steps."""
    model, optim = start(parameters, 0)
    run(model, optim, range(2))
    smp.save_checkpoint(folder, tag, portable=True, model=model, optimizer=optim, user_content={"step": 2})
    return {"losses": run(model, optim, range(2, 4)), "state": model.state_dict()}


def load_each(
    parameters: dict[str, Any], folders: list[tuple[str, str | None]], steps_before: int
) -> list[dict[str, Any]]:
    """From each checkpoint two more steps, in a new session; `steps_before` it has trained already."""
    found = []
    for folder, tag in folders:
        model, optim = start(parameters, 7)
        run(model, optim, range(steps_before))
        content = smp.resume_from_checkpoint(folder, tag)
        losses = run(model, optim, range(2, 4))
        found.append(
            {
                "content": content,
                "losses": losses,
                "state": model.state_dict(),
                "optimizer": optim.state_dict(),
            }
        )
        smp.reset()
    return found


LARGE = {"width": 128, "num_blocks": 4}
"""So that its tensors are larger than what describes them."""


def save_large(parameters: dict[str, Any], folder: str, tag: str) -> None:
    model, optim = start(parameters, 0, **LARGE)
    run(model, optim, range(1))
    smp.save_checkpoint(folder, tag, portable=True, model=model, optimizer=optim)


def load_large(parameters: dict[str, Any], folder: str, tag: str, steps_before: int) -> dict[str, int]:
    """Bytes that this rank has read, and those of its parameters with two moments of each."""
    model, optim = start(parameters, 7, **LARGE)
    run(model, optim, range(steps_before))
    run_bytes, portable_reading._RUN_BYTES = portable_reading._RUN_BYTES, 256  # half a row has 512
    try:
        smp.resume_from_checkpoint(folder, tag)
        run(model, optim, range(1, 2))
    finally:
        portable_reading._RUN_BYTES = run_bytes
    parameters_here = list(model.local_parameters())
    return {
        "read": portable_loading.bytes_read[-1],
        "held": 3 * sum(plain_of(p).numel() * p.element_size() for p in parameters_here),
        "entries": 4 * len(parameters_here),
    }


def unreadable(parameters: dict[str, Any], folder: str, tag: str, steps_before: int) -> dict[str, Any]:
    """The last rank cannot read a piece; then it can."""
    model, optim = start(parameters, 7)
    run(model, optim, range(steps_before))
    intact = portable_loading._piece

    def broken(*args: Any) -> Any:
        raise ArithmeticError("the cause")

    if smp.rank() == smp.size() - 1:
        portable_loading._piece = broken
    said = []
    try:
        said.append(error_of(lambda: smp.resume_from_checkpoint(folder, tag)))
        if not steps_before:  # then it is read by the first step
            said.append(error_of(lambda: run(model, optim, range(1))))
            said.append(error_of(lambda: run(model, optim, range(1))))
    finally:
        portable_loading._piece = intact
    smp.resume_from_checkpoint(folder, tag)
    return {"said": said, "losses": run(model, optim, range(2, 4))}


def disk_full(parameters: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """A rank can write no more than 64 KiB while it saves again."""
    model, optim = start(parameters, 0, **LARGE)
    run(model, optim, range(1))
    smp.save_checkpoint(folder, "t", portable=True, model=model, optimizer=optim, user_content="first")
    run(model, optim, range(1, 2))
    smp.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        said = error_of(lambda: smp.save_checkpoint(folder, "t", portable=True, model=model, optimizer=optim))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    smp.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    return {"said": said, "left": left, "content": smp.resume_from_checkpoint(folder)}


def disagree(parameters: dict[str, Any], folder: str) -> list[str]:
    """Ranks that save, and resume from, different things."""
    model, optim = start(parameters, 0)
    run(model, optim, range(1))
    mine = smp.rank() == 0
    said = [
        error_of(lambda: smp.save_checkpoint(folder, "t", portable=mine, model=model)),
        error_of(
            lambda: smp.save_checkpoint(
                folder, "t", portable=True, model=model, optimizer=optim if mine else None
            )
        ),
    ]
    smp.save_checkpoint(folder, "t", portable=True, model=model)
    said.append(error_of(lambda: smp.resume_from_checkpoint(folder, "t" if mine else None)))
    return said


def other_kinds(parameters: dict[str, Any], folder: str) -> list[Any]:
    """Partial and full checkpoints of parameters that are split: the losses after each, and after none."""
    model, optim = start(parameters, 0)
    run(model, optim, range(2))
    for partial in (True, False):
        smp.save_checkpoint(folder, "t", partial=partial, model=model, optimizer=optim)
    found = [run(model, optim, range(2, 4))]
    for partial in (True, False):
        smp.resume_from_checkpoint(folder, "t", partial=partial)
        found.append(run(model, optim, range(2, 4)))
    return found
