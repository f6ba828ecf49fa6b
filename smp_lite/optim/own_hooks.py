"""Hooks of the library around an optimizer's step, which a script's own hooks never come between.

A script registers hooks before and after the library does. Its own run as if they were called between steps,
before the optimizer gets what it steps and after it has given that back, so the library's are always next to
the step itself: the last before it and the first after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OwnHooks"]


class OwnHooks:
    """Of one optimizer.

    Args:
        optimizer: of torch.
        before: called right before its step, as torch calls a hook.
        after: called with it right after.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[torch.optim.Optimizer, Any, Any], Any],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        def run_after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            after(optimizer)

        self._handles = (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(run_after),
        )

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Whatever has been registered since: called before any of the optimizer's own hooks runs."""
        before, after = self._handles
        for hooks, handle, is_last in (
            (optimizer._optimizer_step_pre_hooks, before, True),
            (optimizer._optimizer_step_post_hooks, after, False),
        ):
            if handle.id in hooks:
                hooks.move_to_end(handle.id, last=is_last)  # type: ignore[attr-defined]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
