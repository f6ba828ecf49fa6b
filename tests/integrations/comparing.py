"""The plain Trainer in one process as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.harness import run_distributed
from tests.integrations.trainer_cases import train

CASES = "tests.integrations.trainer_cases"


def both(
    folder: Path, parameters: dict[str, Any], ranks: int, replicas: int = 1, batch: int = 4, **arguments: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the plain Trainer comes to, and each rank of the job; with the same rows in a batch."""
    plain = train(None, str(folder / "plain"), batch=batch, **arguments)
    ours = run_distributed(
        f"{CASES}:train",
        ranks,
        kwargs={
            "parameters": parameters,
            "folder": str(folder / "ours"),
            "batch": batch // replicas,
            **arguments,
        },
        timeout_s=100,
    )
    return plain, ours


def assert_same(plain: dict[str, Any], ours: list[dict[str, Any]], tolerance: float = 0.0) -> None:
    """Logs, weights and predictions of every rank are the plain ones."""
    for found in ours:
        assert found["events"] == plain["events"]
        assert len(found["logs"]) == len(plain["logs"])
        for mine, theirs in zip(found["logs"], plain["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert _close(mine[key], value, tolerance), f"{key} of {mine} is not that of {theirs}"
        assert found["weights"].keys() == plain["weights"].keys()
        for name, tensor in plain["weights"].items():
            assert _close(found["weights"][name], tensor, tolerance), name
        for key in ("predictions", "labels", "test", "evaluated"):
            assert (key in found) == (key in plain)
            if key in plain:
                assert _close(found[key], plain[key], tolerance), key


def _close(mine: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_close(mine[k], theirs[k], tolerance) for k in theirs)
    if isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs, [tolerance] * len(mine)))
    mine, theirs = (np.asarray(torch.as_tensor(value).float()) for value in (mine, theirs))
    if not tolerance:
        return mine.shape == theirs.shape and bool(np.array_equal(mine, theirs))
    return mine.shape == theirs.shape and bool(np.allclose(mine, theirs, rtol=tolerance, atol=tolerance))
