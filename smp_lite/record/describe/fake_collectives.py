"""Collectives of ``torch.distributed`` on fake tensors: what they write to, and what they return.

Torch's operators for them (``c10d``) write to their first argument, which neither their schemas nor the
versions of tensors tell. Older torches (2.8, 2.10) cannot run them on fake tensors, either; and what only its
real run describes is given copies of its arguments, in which such a write would be lost.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["NAMESPACE", "result", "written"]

NAMESPACE = "c10d"
_ONLY_READ = frozenset(["send", "barrier", "monitored_barrier_", "check_for_nan"])


def written(func: Any, args: tuple[Any, ...]) -> Any:
    """What the operator writes to: a tensor, or lists of tensors."""
    return () if func._schema.name.removeprefix(f"{NAMESPACE}::") in _ONLY_READ else args[0]


def result(func: Any, args: tuple[Any, ...]) -> Any:
    """What the operator returns, its work done."""
    num_returned = len(func._schema.returns)
    if num_returned == 0:
        return None
    work = torch._C._distributed_c10d.FakeWork().boxed()
    return work if num_returned == 1 else (args[0], work)
