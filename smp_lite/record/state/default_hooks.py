"""The hooks on what autograd saves that are in force (``torch.autograd.graph.saved_tensors_hooks``).

Torch tells them from 2.7 on. In 2.6 they are noted where they are entered and left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["top_hooks"]


def top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Those that autograd would call next, to pack and to unpack; None: there are none."""
    return _top()


def _from_torch() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _noted() -> Any:
    stack = getattr(_entered, "stack", None)
    return stack[-1] if stack else None


_entered = threading.local()


def _note() -> None:
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def noting(self: Any) -> None:
        enter(self)
        vars(_entered).setdefault("stack", []).append((self.pack_hook, self.unpack_hook))

    def forgetting(self: Any, *error: object) -> None:
        _entered.stack.pop()
        leave(self, *error)

    saved_tensors_hooks.__enter__ = noting  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = forgetting  # type: ignore[method-assign]


if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    _top = _from_torch
else:
    _top = _noted
    _note()
