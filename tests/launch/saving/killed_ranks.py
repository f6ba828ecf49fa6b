"""A rank is killed while all save: `mpirun -np 2 python -m tests.launch.saving.killed_ranks FOLDER RANK AT`.

The ranks save once, train on and save again under the same tag; then RANK dies before the first operation
on files whose text contains AT. `resumed` tells what two fresh ranks find afterwards.
"""

from __future__ import annotations

import sys

import torch

import smp_lite as smp
from tests.api_support import same
from tests.launch.api.api_model_cases import restart, run, start
from tests.launch.saving.killed_saves import before_each_change, die


def save(folder: str, index: int, model: object, optimizer: object) -> None:
    smp.save_checkpoint(folder, "t", model=model, optimizer=optimizer, user_content={"save": index})


def resumed(folder: str) -> tuple[int, bool]:
    """Which save the user content is of, and whether training goes on as after that save."""
    model, optimizer = start()
    losses = run(model, optimizer, range(4))
    model, optimizer = restart()
    index = smp.resume_from_checkpoint(folder)["save"]
    return index, same(run(model, optimizer, range(index + 1, index + 3)), losses[index + 1 : index + 3])


def main(folder: str, rank: int, at: str) -> None:
    torch.set_num_threads(1)
    model, optimizer = start()
    run(model, optimizer, range(1))
    save(folder, 0, model, optimizer)
    run(model, optimizer, range(1, 2))
    if smp.rank() == rank:
        before_each_change(lambda operation: die() if at in operation else None)
    save(folder, 1, model, optimizer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
