"""Layouts, and checkpoints that each of them and plain PyTorch have written, for the tests of moving."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.harness import run_distributed
from tests.tensor.moving_cases import adamw, build, plain_step


class Layout(NamedTuple):
    """Numbers of stages, of ranks that share a stage, and of replicas."""

    pp: int
    tp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "partitions": self.pp,
            "tensor_parallel_degree": self.tp,
            "microbatches": 2,
            "prescaled_batch": True,
            "ddp": self.tp > 1 or self.dp > 1,  # without, there are no process groups of torch
        }

    def __str__(self) -> str:
        return f"pp{self.pp}-tp{self.tp}-dp{self.dp}"


SOME = [Layout(*sizes) for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1))]
MORE = [Layout(*sizes) for sizes in ((2, 1, 2), (1, 2, 2), (2, 2, 2))]

PLAIN_FORMS = ("listed", "flat", "by position", "model alone")


@dataclass
class Dense:
    """The dense model in one process: losses of four steps, and the states after two and after four."""

    losses: list[float] = field(default_factory=list)
    states: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)


def train_dense(folder: Path) -> Dense:
    """Trains it, and saves after two steps what PyTorch's users save."""
    net = build()
    optim = adamw(net)
    found = Dense()
    for index in range(4):
        found.losses.append(plain_step(net, optim, index))
        found.states[index + 1] = copy.deepcopy((net.state_dict(), optim.state_dict()))
        if index == 1:
            listed = get_optimizer_state_dict(net, optim)
            flat = get_optimizer_state_dict(
                net, optim, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )
            model = net.state_dict()
            forms = {
                "listed": {"model": model, "optimizer": listed},
                "flat": {"model": model, "optim": flat},
                "by position": {"model": model, "optimizer": optim.state_dict()},
                "model alone": model,
            }
            for name in PLAIN_FORMS:
                dcp.save(copy.deepcopy(forms[name]), checkpoint_id=folder / name, no_dist=True)
    return found


class Checkpoints:
    """Saved when they are first asked for, after two steps in a layout; with what went on from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dense = train_dense(folder)
        self._saved: dict[Layout, list[dict[str, Any]]] = {}

    def of(self, layout: Layout) -> Path:
        """The folder."""
        self.gone_on(layout)
        return self.folder / f"{layout}_portable"

    def gone_on(self, layout: Layout) -> list[dict[str, Any]]:
        """By rank, what the run that saved it did next."""
        if layout not in self._saved:
            kwargs = {"parameters": layout.parameters, "folder": str(self.folder), "tag": str(layout)}
            self._saved[layout] = run_distributed(
                "tests.tensor.moving_cases:save", layout.world_size, kwargs=kwargs
            )
        return self._saved[layout]

    def load_in(
        self, layout: Layout, tags: list[str], *, steps_before: int = 0
    ) -> list[list[dict[str, Any]]]:
        """By checkpoint and rank, what two steps in that layout did after loading each."""
        kwargs = {
            "parameters": layout.parameters,
            "folders": [(str(self.folder), tag) for tag in tags],
            "steps_before": steps_before,
        }
        found = run_distributed("tests.tensor.moving_cases:load_each", layout.world_size, kwargs=kwargs)
        return [list(of_ranks) for of_ranks in zip(*found, strict=True)]
