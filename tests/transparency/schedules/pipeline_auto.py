"""What ranks run under ``pipeline: auto``; called through `tests.harness`."""

from __future__ import annotations

import contextlib
import io
import queue
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.plan.partitioning.tree import stage_visits
from tests.models.language import byte_batch, next_token_loss
from tests.transparency.comparison import (
    NUM_MICROBATCHES,
    differences,
    differences_from_plain,
    smp_run,
    too_large,
)
from tests.transparency.schedules.virtual_stages import Language, case_of, same
from tests.transparency.training.replicas import half, replica_runs

__all__ = ["Told", "events", "replicas", "train"]

NUM_STEPS = 11


class Told(NamedTuple):
    """What a rank has seen.

    Attributes:
        wrong: what is not as it must be.
        digest: of the partition.
        visits: the order in which the line of modules comes to the stages.
        pipeline: of the last steps.
        printed: to the standard output, and warnings.
        error: what the first step raised; empty: nothing.
    """

    wrong: list[str]
    digest: str
    visits: tuple[int, ...]
    pipeline: str
    printed: str
    error: str = ""


def _open(parameters: dict[str, Any]) -> None:
    smp.reset()
    smp.init({"partitions": 2, "microbatches": NUM_MICROBATCHES, "pipeline": "auto", **parameters})


def _told(run: Callable[[], list[str]]) -> Told:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrong = run()
        except smp.SMPError as error:
            return Told([], "", (), "", output.getvalue(), str(error))
    partition, costs = smp.state.model.partition_and_costs
    visits = stage_visits(costs, partition.stage_of)
    printed = output.getvalue() + "".join(str(w.message) for w in caught)
    pipeline = smp.state.model.runtime.runner.planner.policy.pipeline
    return Told(wrong, partition.digest(), visits, pipeline, printed)


def train(name: str, parameters: dict[str, Any]) -> Told:
    """Eleven steps of a case, compared with plain torch; where blocks draw random numbers, with 1F1B."""
    case = case_of(name)

    def run() -> list[str]:
        found = smp_run(case, num_steps=NUM_STEPS)
        if name != "dropout in blocks":
            return too_large(case, differences_from_plain(case, found))
        mine, state = [s.outputs for s in found], smp.state.model.state_dict()
        decided = smp.state.model
        _open({"pipeline": "interleaved"})
        wanted = [s.outputs for s in smp_run(case, num_steps=NUM_STEPS)]
        is_same = same(mine, wanted) and same(state, smp.state.model.state_dict())
        smp.state.model = decided
        return [] if is_same else ["other numbers than with 1F1B"]

    _open(parameters)
    return _told(run)


def replicas(parameters: dict[str, Any]) -> Told:
    """Two replicas, against two plain ones."""
    case = case_of("tied")
    _open({**parameters, "ddp": True})
    replica = smp.dp_rank()

    def run() -> list[str]:
        ours = smp_run(case, num_steps=NUM_STEPS, num_samples=16, batch_of=lambda batch: half(batch, replica))
        plain = replica_runs(case, num_steps=NUM_STEPS)[replica]
        pairs = enumerate(zip(ours, plain, strict=True))
        return too_large(case, [d for i, (mine, theirs) in pairs for d in differences(mine, theirs, i)])

    return _told(run)


class Counting(nn.Module):
    """Takes something from a queue, so that it cannot run just to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(100):
            self.numbers.put(number)

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.get_nowait()
        return x


class Queued(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].norm = nn.Sequential(self.blocks[3].norm, Counting())


_MODELS: dict[str, Callable[[], nn.Module]] = {"language": Language, "queued": Queued}


def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return _MODELS[name]()


def events(kinds: Sequence[str], parameters: dict[str, Any], model_name: str = "language") -> Told:
    """Steps of several kinds, against plain torch.

    Args:
        kinds: "train"; "short" with fewer words; "evaluate"; "fail" in the step function of the last rank.
        parameters: more of the configuration.
        model_name: of those above.
    """
    module, plain = _built(model_name), _built(model_name)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    _open(parameters)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, batch: Any, kind: str) -> Tensor:
        loss = next_token_loss(model, batch)
        if kind == "fail" and smp.pp_rank() == 1:
            raise ValueError("the user's own")
        if kind != "evaluate":
            model.backward(loss)
        return loss

    def play(number: int, kind: str) -> list[str]:
        length = 3 if kind == "short" else None
        batch = {k: v.roll(number, 0)[:, :length] for k, v in byte_batch(8).items()}
        parts = [
            dict(zip(batch, values)) for values in zip(*(v.chunk(NUM_MICROBATCHES) for v in batch.values()))
        ]
        optimizer.zero_grad()
        if kind == "fail":
            try:
                step(model, batch, kind)
            except (ValueError, smp.SMPError):
                return []
            return ["no error"]
        with torch.set_grad_enabled(kind != "evaluate"):
            mine = list(step(model, batch, kind).outputs)
            theirs = [next_token_loss(plain, part) for part in parts]
        if kind != "evaluate":
            plain_optimizer.zero_grad()
            for loss in theirs:
                (loss / NUM_MICROBATCHES).backward()
            plain_optimizer.step()
            optimizer.step()
        return [] if same([m.detach() for m in mine], [t.detach() for t in theirs]) else ["other losses"]

    def run() -> list[str]:
        wrong = [f"step {i}: {text}" for i, kind in enumerate(kinds) for text in play(i, kind)]
        return wrong + ([] if same(dict(model.state_dict()), dict(plain.state_dict())) else ["other state"])

    return _told(run)
