"""Kills what saves portable checkpoints.

`python -m tests.tensor.moving_killed FOLDER every N`: one process, before each Nth operation on files, as
:mod:`tests.launch.saving.killed_saves` does. `mpirun -np 2 python -m tests.tensor.moving_killed FOLDER RANK
AT`: two ranks save once, train on and save again; RANK dies before the first operation that contains AT.
"""

from __future__ import annotations

import json
import sys
import warnings
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

import smp_lite as smp
from tests.api_support import in_memory
from tests.launch.saving.killed_saves import Trial, before_each_change, die
from tests.tensor.moving_cases import run, start


class PortableTrial(Trial):
    """Three portable saves with a step before each."""

    def save(self, tag: str, user_content: Any = None, keep: int | None = None) -> None:
        smp.save_checkpoint(
            self.root,
            tag,
            portable=True,
            model=self.model,
            optimizer=self.optimizer,
            user_content=user_content,
            num_kept_partial_checkpoints=keep,
        )


def every(folder: Path, one_in: int) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    in_memory(2)
    trial = PortableTrial(folder, is_partial=True)
    return [*takewhile(bool, map(trial.killed_once, count(step=one_in)))]


def one_rank(folder: str, rank: int, at: str) -> None:
    torch.set_num_threads(1)
    model, optim = start({"partitions": 2, "microbatches": 2}, 0)
    for index in range(2):
        run(model, optim, range(index, index + 1))
        if index == 1 and smp.rank() == rank:
            before_each_change(lambda operation: die() if at in operation else None)
        smp.save_checkpoint(
            folder, "t", portable=True, model=model, optimizer=optim, user_content={"step": index + 1}
        )


if __name__ == "__main__":
    if sys.argv[2] == "every":
        print(json.dumps(every(Path(sys.argv[1]), int(sys.argv[3]))))
    else:
        one_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
