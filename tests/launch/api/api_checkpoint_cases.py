"""What the tests of checkpoints run in the ranks."""

from __future__ import annotations

import resource
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import smp_lite as smp
from tests.api_support import Net, batch, build, place, plain_train, same, wrap
from tests.launch.api.api_cases import error_of
from tests.launch.api.api_model_cases import ADAMW, restart, run, start


def resume(directory: str, steps_before: int, by_tag: bool) -> dict[str, Any]:
    """Trains, saves, trains on; then resumes with other weights and trains on."""
    model, optimizer = start()
    run(model, optimizer, range(3))
    smp.save_checkpoint(directory, "three", model=model, optimizer=optimizer, user_content={"step": 3})
    losses = run(model, optimizer, range(3, 5))
    wanted = model.state_dict(), optimizer.state_dict()
    files = sorted(str(p.relative_to(directory)) for p in Path(directory).rglob("*.*"))
    model, optimizer = restart()
    run(model, optimizer, range(steps_before))
    content = smp.resume_from_checkpoint(directory, tag="three" if by_tag else None)
    return {
        "content": content,
        "losses": same(run(model, optimizer, range(3, 5)), losses),
        "states": same((model.state_dict(), optimizer.state_dict()), wanted),
        "files": files,
    }


def full_checkpoint(directory: str) -> dict[str, Any]:
    """Saved by 4 ranks, gone on with by a plain model; and a plain model's own file resumed from."""
    model, optimizer = start()
    run(model, optimizer, range(2))
    smp.save_checkpoint(directory, "full", partial=False, model=model, optimizer=optimizer, user_content=[1])
    losses = run(model, optimizer, range(2, 4))
    wanted = model.state_dict(), optimizer.state_dict()
    plain = Net()
    plain.load_state_dict(torch.load(f"{directory}/full", weights_only=True))
    its = ADAMW(plain.parameters())
    its.load_state_dict(torch.load(f"{directory}/optimizer_full", weights_only=True))
    if smp.rank() == 0:
        torch.save(build(seed=9).state_dict(), f"{directory}/plain")
    smp.barrier()
    model, optimizer = restart()
    content = smp.resume_from_checkpoint(directory, partial=False)
    resumed = run(model, optimizer, range(2, 4))
    state = model.state_dict(), optimizer.state_dict()
    smp.resume_from_checkpoint(directory, tag="plain", partial=False, load_optimizer=False)
    return {
        "content": content,
        "losses": same(resumed, losses),
        "states": same(state, wanted),
        "plain": torch.allclose(resumed[0], plain_train(plain, *batch(2 + 100 * smp.dp_rank())), rtol=1e-6),
        "plain optimizer": sorted(its.state_dict()["state"]) == list(range(len(list(plain.parameters())))),
        "from plain": same(model.state_dict(), build(seed=9).state_dict()),
    }


def save_full(directory: str) -> list[torch.Tensor]:
    """The losses after the save."""
    model, optimizer = start()
    run(model, optimizer, range(2))
    smp.save_checkpoint(directory, "t", partial=False, model=model, optimizer=optimizer, user_content=[1])
    return run(model, optimizer, range(2, 4))


def resume_full(directory: str, steps_before: int, last: str) -> list[torch.Tensor]:
    """The losses after resuming, with the module `last` alone on the last stage."""
    smp.init()
    net = build(seed=8)
    place(lambda name: (smp.pp_size() - 1) * name.startswith(last), net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(ADAMW(model.parameters()))
    run(model, optimizer, range(steps_before))
    assert smp.resume_from_checkpoint(directory, partial=False) == [1]
    return run(model, optimizer, range(2, 4))


def mixtures(directory: str) -> dict[str, str]:
    """What both ranks say of parts of different saves, of a missing part, and of different questions."""
    root = Path(directory)
    model, optimizer = start()
    for tag in ("a", "b", "c"):
        run(model, optimizer, range(1))
        smp.save_checkpoint(root, tag, model=model, optimizer=optimizer)
    if smp.rank() == 0:
        for part in ("model_1.pt", "optimizer_1.pt"):
            shutil.copy(root / "a_partial" / part, root / "b_partial" / part)
        (root / "c_partial" / "optimizer_1.pt").unlink()
    smp.barrier()
    model, optimizer = restart()
    said = {tag: error_of(lambda: smp.resume_from_checkpoint(root, tag=tag)) for tag in "bc"}  # noqa: B023
    mine = str(smp.rank())
    said["resumed tags"] = error_of(lambda: smp.resume_from_checkpoint(root, tag=mine))
    said["none"] = error_of(lambda: smp.resume_from_checkpoint(root, tag="d"))
    run(model, optimizer, range(1))
    said["saved tags"] = error_of(lambda: smp.save_checkpoint(root, mine, model=model))
    optional = optimizer if smp.rank() else None
    said["parts"] = error_of(lambda: smp.save_checkpoint(root, "e", optimizer=optional))
    # Nothing of all that has stuck.
    said["a"] = error_of(lambda: smp.resume_from_checkpoint(root, tag="a"))
    return said


def waiting_state() -> list[str]:
    """The optimizer's part, too, is not there before the first step has put it in place."""
    model, optimizer = start()
    run(model, optimizer, range(1))
    part = optimizer.local_state_dict()
    model, optimizer = restart()
    optimizer.load_state_dict(part)
    said = [error_of(optimizer.state_dict), error_of(optimizer.local_state_dict)]
    run(model, optimizer, range(1))
    return [*said, error_of(optimizer.state_dict)]


def disk_full(directory: str, rank: int, is_partial: bool) -> dict[str, Any]:
    """A rank can write no more than 1 MiB; then it can."""
    smp.init()
    net = torch.nn.Sequential(
        *(torch.nn.Linear(*size) for size in ((4, 600), (600, 600), (600, 600), (600, 1)))
    )
    model, optimizer = wrap(net, ADAMW)
    smp.set_partition(net[2], 1)
    run(model, optimizer, range(1))

    def save() -> None:
        smp.save_checkpoint(directory, "t", partial=is_partial, model=model, optimizer=optimizer)

    def left() -> list[str]:
        smp.barrier()
        return sorted(path.name for path in Path(directory).iterdir())

    save()
    before, state = left(), model.state_dict()
    run(model, optimizer, range(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        said = error_of(save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    same_files = left() == before
    smp.resume_from_checkpoint(directory, partial=is_partial)
    old_resumes = same(model.state_dict(), state)
    return {"said": said, "files": same_files, "old": old_resumes, "later": error_of(save)}


def own_disks(directory: str) -> dict[str, Any]:
    """Each rank has a disk of its own; then they are brought together, as a job's checkpoints in S3 are."""
    model, optimizer = start()
    mine, together = Path(directory, str(smp.rank())), Path(directory, "together")
    for tag in ("t", "t", "u"):
        run(model, optimizer, range(1))
        smp.save_checkpoint(
            mine,
            tag,
            model=model,
            optimizer=optimizer,
            num_kept_partial_checkpoints=1 if tag == "u" else None,
        )
    files = sorted(str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file())
    state = model.state_dict(), optimizer.state_dict()
    shutil.copytree(mine, together, dirs_exist_ok=True)
    smp.barrier()
    resumed = []
    for root in (mine, together):
        model, optimizer = restart()
        run(model, optimizer, range(1))
        smp.resume_from_checkpoint(root)
        resumed.append(same((model.state_dict(), optimizer.state_dict()), state))
    return {"files": files, "resumed": resumed}


def save_and_load(directory: str) -> dict[str, Any]:
    """The guide's pattern: saving on dp rank 0, loading on all."""
    model, optimizer = start()
    run(model, optimizer, range(1))
    file = f"{directory}/part.pt"
    if smp.dp_rank() == 0:
        smp.save({"model": model.local_state_dict(), "mp_rank": smp.mp_rank()}, file, partial=True)
    smp.barrier()
    loaded = smp.load(file, partial=True)
    return {
        "mine": loaded["mp_rank"] == smp.mp_rank(),
        "equal": same(loaded["model"], smp.allgather(model.local_state_dict(), smp.DP_GROUP)[0]),
        "files": sorted(p.name for p in Path(directory).iterdir()),
    }


def listed_twice(directory: str) -> dict[str, Any]:
    """The optimizer's one group has a parameter of each stage twice, as scripts collect tied weights."""
    warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate")

    def twice(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        found = list(parameters)
        return ADAMW([*found, found[0], found[-1]])

    model, optimizer = start(optimizer=twice)
    run(model, optimizer, range(2))
    plain = build()
    stepped = twice(plain.parameters())
    for index in range(2):
        stepped.zero_grad()
        plain_train(plain, *batch(index))
        stepped.step()
    whole = same((model.state_dict(), optimizer.state_dict()), (plain.state_dict(), stepped.state_dict()))
    smp.save_checkpoint(directory, "two", model=model, optimizer=optimizer)
    losses = run(model, optimizer, range(2, 4))
    smp.reset()
    model, optimizer = start(8, twice)
    smp.resume_from_checkpoint(directory)
    return {"whole": whole, "losses": same(run(model, optimizer, range(2, 4)), losses)}
