"""What the tests of checkpoints run in the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import smp_lite as smp
from tests.api_support import Net, batch, build, plain_train, same
from tests.launch.api_model_cases import restart, run, start


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
    """Saved by 4 ranks, read by a plain model; and a plain model's own file resumed from."""
    model, optimizer = start()
    run(model, optimizer, range(2))
    smp.save_checkpoint(directory, "full", partial=False, model=model, user_content=[1])
    losses = run(model, optimizer, range(2, 3))
    plain = Net()
    plain.load_state_dict(torch.load(f"{directory}/full", weights_only=True))
    if smp.rank() == 0:
        torch.save(build(seed=9).state_dict(), f"{directory}/plain")
    smp.barrier()
    model, optimizer = restart()
    content = smp.resume_from_checkpoint(directory, partial=False)
    resumed = run(model, optimizer, range(2, 3))
    smp.resume_from_checkpoint(directory, tag="plain", partial=False)
    return {
        "content": content,
        "losses": same(resumed, losses),
        "plain": torch.allclose(resumed[0], plain_train(plain, *batch(2 + 100 * smp.dp_rank())), rtol=1e-6),
        "from plain": same(model.state_dict(), build(seed=9).state_dict()),
    }


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
