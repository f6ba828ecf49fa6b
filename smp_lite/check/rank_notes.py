"""What the ranks of a check have left, read and put together by the process that compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..systems.plan.parallel_plan import ParallelPlan
from ..tensor_parallel.split_record import Split
from .in_ranks import file_of_failure, file_of_setting, file_of_step
from .module_calls import Outline
from .observe import Key

__all__ = ["Failure", "RankNotes", "Replica", "StepOfRanks"]


@dataclass(frozen=True)
class Failure:
    """The first error of a step: which step, on which rank, its text, the module, and the traceback."""

    step: int
    rank: int
    text: str
    module: str
    trace: str


@dataclass(frozen=True)
class Replica:
    """One batch of a step.

    Attributes:
        inputs: for each microbatch the tensors among the leaves of its arguments.
        random: random states at the beginning.
        result: of the step function; None where it failed.
    """

    inputs: list[list[torch.Tensor | None]]
    random: tuple[Any, ...]
    result: list[Any] | None


@dataclass(frozen=True)
class StepOfRanks:
    """One step, whole.

    Attributes:
        weights: at its beginning.
        gradients, buffers: at its end.
        others: for each rank that holds what another speaks for: norms of gradients by name.
        replicas: in the order of their ranks.
        calls: of the first replica's modules.
        seeded, labels: which calls the library seeded, and which it made whole.
        split: which modules are split, if the model was split by a plan.
        sums: gradients are sums over microbatches, and not means.
    """

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    others: dict[int, dict[str, float | None]]
    replicas: list[Replica]
    calls: dict[str, list[tuple[Outline, ...]]]
    seeded: frozenset[Key]
    labels: frozenset[str]
    split: Split | None
    sums: bool


class RankNotes:
    """All notes of a job.

    Args:
        folder: where the ranks have left them.
        num_ranks: of the job.

    Attributes:
        num_steps: that all ranks have ended.
        failure: by which the job's steps ended, if they did.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self.failure = self._first_failure()
        self.num_steps = self._count_steps()

    @property
    def setting(self) -> Mapping[str, Any] | None:
        """What rank 0 has said of the job; None: it did not come to ``smp.init()``."""
        path = file_of_setting(self._folder)
        return torch.load(path, weights_only=False) if path.exists() else None

    @property
    def plan(self) -> ParallelPlan | None:
        """Of another system's configuration."""
        return None if self.setting is None else self.setting["plan"]

    def step(self, index: int) -> StepOfRanks:
        """One step; of one that failed only what was noted before."""
        notes = [self._of(rank, index) for rank in range(self._num_ranks)]
        speakers = [note for note in notes if "buffers" in note or _has_tensors(note)]
        bringers = sorted((note for note in notes if "inputs" in note), key=lambda note: note["replica"])
        first = notes[0]
        return StepOfRanks(
            weights=_merged(speakers, "weights"),
            gradients=_merged(speakers, "gradients"),
            buffers=_merged(speakers, "buffers"),
            others={
                rank: note["gradients"]
                for rank, note in enumerate(notes)
                if "gradients" in note and "buffers" not in note
            },
            replicas=[Replica(note["inputs"], note["random"], note.get("result")) for note in bringers],
            calls=_merged(speakers, "calls"),
            seeded=frozenset().union(*(note.get("seeded", ()) for note in notes)),
            labels=frozenset().union(*(note.get("labels", ()) for note in notes)),
            split=first.get("split"),
            sums=first.get("reduces_sums", False),
        )

    def _of(self, rank: int, step: int) -> dict[str, Any]:
        path = file_of_step(self._folder, rank, step)
        found: dict[str, Any] = torch.load(path, weights_only=False) if path.exists() else {}
        return found

    def _count_steps(self) -> int:
        count = 0
        while all(file_of_step(self._folder, rank, count).exists() for rank in range(self._num_ranks)):
            if any("gradients" not in self._of(rank, count) for rank in range(self._num_ranks)):
                break
            count += 1
        return count

    def _first_failure(self) -> Failure | None:
        """That of a rank which did not fail because of another."""
        found = []
        for rank in range(self._num_ranks):
            path = file_of_failure(self._folder, rank)
            if path.exists():
                said = json.loads(path.read_text())
                failure = Failure(said["step"], rank, said["text"], said["module"], said["trace"])
                found.append((said["is_of_another"], rank, failure))
        return min(found, key=lambda each: each[:2])[2] if found else None


def _has_tensors(note: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in note.get("weights", {}).values())


def _merged(notes: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of several stages; what more than one of them has is taken once."""
    found: dict[str, Any] = {}
    for note in notes:
        for name, value in note.get(key, {}).items():
            found.setdefault(name, value)
    return found
