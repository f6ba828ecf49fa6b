"""What ranks run where the partitioner gives each stage several pieces; called through `tests.harness`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.plan.partitioning.tree import stage_visits
from tests.models import Batch, Case
from tests.models.language import byte_batch, next_token_loss
from tests.transparency.comparison import (
    NUM_MICROBATCHES,
    differences,
    differences_from_plain,
    smp_run,
    too_large,
)
from tests.transparency.training.replicas import half, replica_runs

__all__ = ["NAMES", "Language", "case_of", "checkpoints", "replicas", "same", "told", "train"]

WIDTH = 16


class Block(nn.Module):
    """A residual branch; one that drops draws random numbers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training and self.p > 0)


class Language(nn.Module):
    """Embedding, blocks, head; the root itself drops as well, if asked."""

    def __init__(self, *, tied: bool = False, root_p: float = 0.0, block_p: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(block_p) for _ in range(10))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.root_p = root_p

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.root_p:
            x = F.dropout(x, self.root_p)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _case(name: str, build: Callable[[], nn.Module]) -> Case:
    return Case(name, build, byte_batch, "", next_token_loss)


_CASES = {
    "plain": _case("plain", Language),
    "tied": _case("tied", lambda: Language(tied=True)),
    "dropout around blocks": _case("dropout around blocks", lambda: Language(tied=True, root_p=0.25)),
    "dropout in blocks": _case("dropout in blocks", lambda: Language(block_p=0.25)),
}
NAMES = tuple(_CASES)


def case_of(name: str) -> Case:
    return _CASES[name]


def _open(parameters: dict[str, Any]) -> None:
    smp.reset()
    smp.init({"partitions": 2, "microbatches": NUM_MICROBATCHES, **parameters})


def _visits() -> tuple[int, ...]:
    partition, costs = smp.state.model.partition_and_costs
    return stage_visits(costs, partition.stage_of)


def train(name: str, all_parameters: Sequence[dict[str, Any]]) -> list[tuple[list[str], tuple[int, ...]]]:
    """Trains a case by each of the configurations, and compares with plain torch; where blocks draw random
    numbers, with one piece for each stage.

    Returns:
        Of each: what is wrong, and the order in which the line of modules comes to the stages.
    """
    case = _CASES[name]
    found = []
    for parameters in all_parameters:
        checkpointed = parameters.get("checkpointed")
        parameters = {key: value for key, value in parameters.items() if key != "checkpointed"}
        options = {"prepare": _checkpoint_blocks} if checkpointed else {}
        _open(parameters)
        if name != "dropout in blocks":
            wrong = too_large(case, differences_from_plain(case, smp_run(case, **options)))
            found.append((wrong, _visits()))
            continue
        outputs = [snapshot.outputs for snapshot in smp_run(case, **options)]
        visits = _visits()
        state = smp.state.model.state_dict()
        _open(parameters | {"virtual_stages": 1, "pipeline": "interleaved"})
        wanted = [snapshot.outputs for snapshot in smp_run(case)]
        is_same = same(outputs, wanted) and same(state, smp.state.model.state_dict())
        found.append(([] if is_same else ["other numbers than with one piece"], visits))
    return found


def _checkpoint_blocks(model: smp.DistributedModel) -> None:
    for block in model.module.blocks:
        smp.set_activation_checkpointing(block)


def same(ours: Any, theirs: Any) -> bool:
    """To the bit."""
    if isinstance(ours, Tensor):
        return torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def replicas(parameters: dict[str, Any]) -> tuple[list[str], tuple[int, ...]]:
    """The tied model on two replicas, against two plain ones."""
    _open(parameters | {"ddp": True})
    case = _CASES["tied"]
    replica = smp.dp_rank()
    ours = smp_run(case, num_samples=16, batch_of=lambda batch: half(batch, replica))
    plain = replica_runs(case, num_steps=2, device=smp.state.device)[replica]
    wrong = [
        d
        for i, (mine, theirs) in enumerate(zip(ours, plain, strict=True))
        for d in differences(mine, theirs, i)
    ]
    return too_large(case, wrong), _visits()


def _start(
    parameters: dict[str, Any], seed: int, *, tied: bool = True
) -> tuple[Any, Any, Callable[[int], list[Tensor]]]:
    _open(parameters)
    torch.manual_seed(seed)
    model = smp.DistributedModel(Language(tied=tied))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def step(model: smp.DistributedModel, batch: Batch) -> Tensor:
        loss = next_token_loss(model, batch)
        model.backward(loss)
        return loss

    def run(index: int) -> list[Tensor]:
        optimizer.zero_grad()
        batch = {name: tensor.roll(index, 0) for name, tensor in byte_batch(8).items()}
        losses = [loss.detach().clone() for loss in step(model, batch).outputs]
        optimizer.step()
        return losses

    return model, optimizer, run


def checkpoints(folder: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves in all forms, trains on; then resumes each with other parameters and trains on.

    Returns:
        Of each form, whether losses and state are the same; the orders of the stages; and what is said of a
        partial one before and after the first step.
    """
    model, optimizer, run = _start(before, seed=1)
    run(0)
    said: dict[str, Any] = {"before": _visits()}
    smp.save_checkpoint(folder, "partial", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "full", partial=False, model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "portable", model=model, optimizer=optimizer, portable=True)
    wanted = [run(1), run(2)], model.state_dict(), optimizer.state_dict()
    for form in ("full", "portable", "partial"):
        model, optimizer, run = _start(after, seed=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            smp.resume_from_checkpoint(folder, tag=form, partial=form != "full")
            found = [run(1), run(2)], model.state_dict(), optimizer.state_dict()
        said[form] = same(found, wanted), _visits()
        said[f"{form} warnings"] = [str(w.message) for w in caught if "virtual_stages" in str(w.message)]
    model, optimizer, run = _start(after, seed=2)
    run(0)
    try:
        smp.resume_from_checkpoint(folder, tag="partial")
    except smp.SMPError as error:
        said["late"] = str(error)
    return said


def told(parameters: dict[str, Any], places: dict[int, int] | None = None, tied: bool = True) -> str:
    """What the first step says: an error, or warnings of pieces.

    Args:
        places: from these blocks on, by hand, another stage.
        tied: whether the head is.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, _, run = _start(parameters, seed=1, tied=tied)
            stage = 0
            for number, block in enumerate(model.module.blocks):
                if places is not None:
                    stage = places.get(number, stage)
                    smp.set_partition(block, stage)
            if not tied:
                smp.set_partition(model.module.head, stage)
            run(0)
        except (smp.SMPError, ValueError) as error:
            return f"error: {error}"
    return "".join(str(w.message) for w in caught if "comes to the stages" in str(w.message))
