"""Steps of one GPT on two ranks, by the library, by torch.distributed.pipelining, and written by hand.

Each contestant has two processes of its own, which sleep while others step, and the same weights and batch.
A step is zero_grad, forwards and backwards, without an optimizer. Torch is told to keep no outputs, since the
others return losses only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed import pipelining

import smp_lite as smp
from notebooks.gpt import GPT
from tests.benchmarks.measuring import timed
from tests.benchmarks.workload import Workload, next_byte_loss, train_step

__all__ = ["BY_HAND", "NUM_STAGES", "OURS", "THEIRS", "gradients", "set_up", "step_time"]

NUM_STAGES = 2

OURS: dict[str, dict[str, Any]] = {
    "interleaved": {"pipeline": "interleaved"},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "interleaved_virtual": {"pipeline": "interleaved_virtual"},
    "zero_bubble_v": {"pipeline": "zero_bubble_v"},
    "auto": {"pipeline": "auto", "auto_partition": True, "default_partition": None},
}
"""SMP parameters by name; all but ``auto`` have torch's pieces."""

_REPLAYED = ", static_mode"
"""Behind a name: recorded once, then replayed."""

OURS |= {f"{name}{_REPLAYED}": {**OURS[name], "static_mode": True} for name in ("interleaved", "auto")}

_ROUND, _V = (0, 1, 0, 1), (0, 1, 1, 0)

THEIRS: dict[str, tuple[str, tuple[int, ...]]] = {
    "ScheduleGPipe": ("ScheduleGPipe", (0, 1)),
    "Schedule1F1B": ("Schedule1F1B", (0, 1)),
    "ScheduleInterleaved1F1B": ("ScheduleInterleaved1F1B", _ROUND),
    "ScheduleInterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", _ROUND),
    "ScheduleZBVZeroBubble": ("ScheduleZBVZeroBubble", _V),
}
"""Torch's class, and the rank of each piece."""

BY_HAND = "1F1B by hand"

_PIECES_OF_OURS = {"interleaved_virtual": _ROUND, "zero_bubble_v": _V}

_SHORT_S = 1.0

_step: Callable[[], Any] | None = None
_parameters: Callable[[], dict[str, nn.Parameter]] = dict


def set_up(name: str, workload: Workload, store: str, num_warm_up: int) -> None:
    """Runs in both ranks: makes the contestant, and warms it up."""
    global _step, _parameters
    torch.set_num_threads(1)
    if name in OURS:
        _step, _parameters = _ours(name, workload)
    elif name == BY_HAND:
        _step, _parameters = _by_hand(workload, MPI.COMM_WORLD)
    else:
        rank = MPI.COMM_WORLD.Get_rank()
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, NUM_STAGES), rank=rank, world_size=NUM_STAGES
        )
        _step, _parameters = _theirs(name, workload, rank)
    for _ in range(num_warm_up):
        _step()


def step_time() -> float:
    """Seconds of a step in this rank.

    Others have run in between: where a step is short, so that finding cold caches shows, it is the second.
    """
    assert _step is not None, "set_up comes first"
    first = timed(_step)
    is_short = MPI.COMM_WORLD.allreduce(first < _SHORT_S, op=MPI.LAND)
    return timed(_step) if is_short else first


def gradients() -> dict[str, Tensor]:
    """What the last step has left in this rank, by the whole model's names."""
    return {name: p.grad.clone() for name, p in _parameters().items() if p.grad is not None}


def _ours(name: str, workload: Workload) -> tuple[Callable[[], Any], Callable[[], dict[str, nn.Parameter]]]:
    settings = {**workload.parameters(NUM_STAGES, "interleaved"), **OURS[name]}
    smp.init({key: value for key, value in settings.items() if value is not None})
    if settings["pipeline"] == "auto":
        model = smp.DistributedModel(workload.model())
    else:
        model = workload.distributed(NUM_STAGES, _PIECES_OF_OURS.get(name, (0, 1)))
    tokens, targets = workload.batch()
    step = train_step([])

    def run() -> None:
        model.zero_grad()
        step(model, tokens, targets)

    return run, lambda: dict(model.local_named_parameters())


def _theirs(
    name: str, workload: Workload, rank: int
) -> tuple[Callable[[], Any], Callable[[], dict[str, nn.Parameter]]]:
    schedule_name, ranks = THEIRS[name]
    pieces = [piece for piece, owner in enumerate(ranks) if owner == rank]
    modules = [Piece(workload, piece, len(ranks)) for piece in pieces]
    stages = [
        pipelining.PipelineStage(module, piece, len(ranks), torch.device("cpu"))
        for piece, module in zip(pieces, modules, strict=True)
    ]
    make = getattr(pipelining, schedule_name)
    is_single = len(ranks) == NUM_STAGES
    schedule = make(stages[0] if is_single else stages, workload.num_microbatches, loss_fn=next_byte_loss)
    tokens, targets = workload.batch()
    given = (tokens,) if 0 in pieces else ()
    is_last = len(ranks) - 1 in pieces

    def run() -> None:
        for module in modules:
            module.zero_grad()
        more: dict[str, Any] = {"target": targets, "losses": []} if is_last else {}
        schedule.step(*given, return_outputs=False, **more)

    return run, lambda: {name: p for module in modules for name, p in module.own.items()}


def _by_hand(
    workload: Workload, comm: MPI.Comm
) -> tuple[Callable[[], Any], Callable[[], dict[str, nn.Parameter]]]:
    """1F1B of two stages, as short as it can be: what a library may cost is its distance from this."""
    rank = comm.Get_rank()
    module = Piece(workload, rank, NUM_STAGES)
    count = workload.num_microbatches
    tokens, targets = (whole.chunk(count) for whole in workload.batch())
    shape = (*tokens[0].shape, workload.d_model)

    def buffer(tensor: Tensor) -> list[object]:
        size = tensor.numel() * tensor.element_size()
        return [MPI.buffer.fromaddress(tensor.data_ptr(), size), MPI.BYTE]

    def first() -> None:
        outputs, sent = {}, []
        for m in range(count + 1):
            if m < count:
                outputs[m] = module(tokens[m])
                sent.append(comm.Isend(buffer(outputs[m]), dest=1))
            if m:
                gradient = torch.empty(shape)
                comm.Recv(buffer(gradient), source=1)
                outputs.pop(m - 1).backward(gradient)
        MPI.Request.Waitall(sent)

    def last() -> None:
        inputs = [torch.empty(shape) for _ in range(count)]
        arriving = [comm.Irecv(buffer(x), source=0) for x in inputs]
        sent = []
        for m in range(count):
            arriving[m].Wait()
            x = inputs[m].requires_grad_()
            (next_byte_loss(module(x), targets[m]) / count).backward()
            sent.append(comm.Isend(buffer(x.grad), dest=0))
        MPI.Request.Waitall(sent)

    def run() -> None:
        module.zero_grad()
        (last if rank else first)()

    return run, lambda: module.own


class Piece(nn.Module):
    """One of several pieces of the GPT, cut by hand as torch's pipelines need it.

    Attributes:
        own: its parameters under the names that they have in the whole model.
    """

    def __init__(self, workload: Workload, piece: int, num_pieces: int) -> None:
        super().__init__()
        self.gpt: GPT = workload.model()
        self.is_first, self.is_last = piece == 0, piece == num_pieces - 1
        self.block_indices = [
            index
            for index in range(workload.num_blocks)
            if workload.stage_of_block(index, num_pieces) == piece
        ]
        keep = {f"blocks.{index}." for index in self.block_indices}
        keep |= {"token_embedding.", "position_embedding."} if self.is_first else set()
        keep |= {"norm.", "head."} if self.is_last else set()
        self.own = {
            name: parameter for name, parameter in self.gpt.named_parameters() if name.startswith(tuple(keep))
        }

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        gpt = self.gpt
        if self.is_first:
            positions = torch.arange(x.shape[1])
            x = gpt.token_embedding(x) + gpt.position_embedding(positions)
        for index in self.block_indices:
            x = gpt.blocks[index](x)
        return gpt.head(gpt.norm(x)) if self.is_last else x
