"""Hooks on what autograd saves, for the length of a run that is only looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph

__all__ = ["hooks_on_saved"]


@contextlib.contextmanager
def hooks_on_saved(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any] = lambda packed: packed
) -> Iterator[None]:
    """``saved_tensors_hooks``; off inside ``torch.func.grad`` and its like, which refuse to run under any."""
    hooks = graph.saved_tensors_hooks(pack, unpack)
    original = graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def without(message: str) -> Iterator[None]:
        hooks.__exit__(None, None, None)
        try:
            with original(message):
                yield
        finally:
            hooks.__enter__()

    with hooks:
        graph.disable_saved_tensors_hooks = without  # type: ignore[assignment]
        try:
            yield
        finally:
            graph.disable_saved_tensors_hooks = original
