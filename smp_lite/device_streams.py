"""Streams of this process's device beside the one that computes; see :mod:`.devices`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .devices import current_stream, home, is_host, module

__all__ = ["hand_to_current", "queue_behind", "side_stream", "within"]


def side_stream() -> Any:
    """A stream beside the one that computes; None: the device has none, and all is done at once."""
    make = None if is_host(home()) else getattr(module(home()), "Stream", None)
    return None if make is None else make()


def within(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Within: what is queued goes to that stream; None: where it always goes."""
    return contextlib.nullcontext() if stream is None else module(home()).stream(stream)


def queue_behind(place: Any) -> None:
    """What the current stream does from now on comes after that place of another stream.

    Args:
        place: an event; None: the device has none, and all is done at once.
    """
    if place is not None:
        current_stream().wait_event(place)


def hand_to_current(tensor: torch.Tensor, ready: Any) -> None:
    """What the current stream does from now on finds the tensor, which another stream has made.

    Args:
        tensor: its memory is that other stream's, and stays until this one has used it.
        ready: an event of the other stream; None: the device has no streams.
    """
    queue_behind(ready)
    if ready is not None:
        tensor.record_stream(current_stream())
