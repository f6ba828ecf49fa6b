"""The torch state around a command: grad mode, inference mode, autocast.

A command is recorded now and runs later, so it carries the state that it was recorded under. Entering a
state costs nothing where it is the one in force already, which is nearly always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_DEVICE_TYPES = ("cpu", "cuda")


class Ambient(NamedTuple):
    """Hashable, so that it can be part of a cache key."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls) -> Ambient:
        autocast = tuple(
            [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES]
        )
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets this state, and puts the former one back."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, (enabled, dtype) in zip(_DEVICE_TYPES, self.autocast, strict=True):
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                    )
            yield
